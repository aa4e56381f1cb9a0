"""What this library computes for every array of the golden vectors in tests/data/quantization (see its README)."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from quant_differences import Case

from cute_nvfp4 import formats
from cute_nvfp4.formats import MXFP4, NVFP4, Format, unpack_e2m1
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops import (
    quantize_request,
)
from cute_nvfp4.ops.dequantize import dequantize
from cute_nvfp4.ops.quantize import (
    quantize,
    tensor_amax,
)
from cute_nvfp4.quantization import philox
from cute_nvfp4.quantization.block_sums import ordered_sum
from cute_nvfp4.quantization.blocks import global_scale_from_amax
from cute_nvfp4.quantization.hadamard import Hadamard
from cute_nvfp4.quantization.rules import resolve_rule
from cute_nvfp4.scale_layout import from_blocked, to_blocked

DATA = Path(__file__).parents[2] / "data" / "quantization"
FOUROVERSIX, FOUROVERSIX_GIT = "fouroversix_1.0.5", "fouroversix_git_1.1.0"
QWANTIZE, TORCHAO, TORCH = "qwantize_0.1.1", "torchao_0.18.0", "torch_2.13.0"
PEERS = (FOUROVERSIX, QWANTIZE, TORCHAO, TORCH, FOUROVERSIX_GIT)

FOUR_SIX_RULES = {"mse": "four_six_mse", "mae": "four_six_mae", "abs_max": "four_six_abs_max"}
MX_FORMATS = {"mx_e4m3": "mxfp8_e4m3", "mx_e5m2": "mxfp8_e5m2", "mx_fp4": "mxfp4", "mxfp8": "mxfp8_e4m3"}
# block sizes that no hardware reads, but that qwantize has: a format is data
QWANTIZE_FORMATS = {
    ("nvfp4", "b16"): NVFP4,
    ("nvfp4", "b32"): Format("nvfp4_b32", "e2m1", 32, "e4m3", True),
    ("mxfp4", "b32"): MXFP4,
    ("mxfp4", "b16"): Format("mxfp4_b16", "e2m1", 16, "ue8m0", False),
}

# arrays that are not results, or are results of what this library does not have; the reason is printed
OUT_OF_SCOPE = (
    ("input", r"^input/|/input\d*(_f32)?$|^stochastic/|^pack_uint4/input"),
    ("an input echoed (amax was given)", r"_amax[\d.]+/.*/amax_f32$"),
    ("format IF4, IF6, NVINT4 or FP6", r"(^|/)(if4|if6_\w+|nvint4|nvfp6_\w+|mx_fp6_\w+)/"),
    ("ADMM solver", r"/nvfp4_admm/"),
    ("stochastic rounding to 16/17 of the range", r"^w_stochunb/"),
)


@functools.cache
def arrays(peer: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{peer}.npz") as file:
        return {name: file[name] for name in file.files}


def out_of_scope(key: str) -> str | None:
    """Why ``key`` is not compared, or None."""
    for reason, pattern in OUT_OF_SCOPE:
        if re.search(pattern, key):
            return reason
    return None


def codes_of(q: BlockScaledTensor) -> np.ndarray:
    return (unpack_e2m1(q.data) if q.format.elements_per_byte == 2 else q.data).numpy()


def flat_blocked(scale: torch.Tensor) -> np.ndarray:
    """Bytes of a blocked scale tensor in the order of memory."""
    return scale.permute(5, 2, 4, 0, 1, 3).reshape(-1).numpy()


def source(peer: str, name: str) -> torch.Tensor:
    """The input that a key's first part names; its suffixes say what was done to it."""
    store = arrays(FOUROVERSIX if peer == FOUROVERSIX_GIT else peer)
    name = re.sub(r"_amax[\d.]+$|_rht$|_stoch$", "", name)
    dtype = torch.float32
    for suffix, kind in (("_bf16", torch.bfloat16), ("_f16", torch.float16)):
        if name.endswith(suffix):
            name, dtype = name.removesuffix(suffix), kind
    return torch.from_numpy(store[f"input/{name}"]).to(dtype)


def compute(peer: str, key: str) -> np.ndarray:
    """This library's array for ``key``."""
    compute_of: dict[str, Callable[[str], np.ndarray]] = {
        FOUROVERSIX: functools.partial(_fouroversix, FOUROVERSIX),
        FOUROVERSIX_GIT: functools.partial(_fouroversix, FOUROVERSIX_GIT),
        QWANTIZE: _qwantize,
        TORCHAO: _torchao,
        TORCH: _torch,
    }
    return compute_of[peer](key)


@functools.cache
def rotation() -> Hadamard:
    """fouroversix's Hadamard matrix, of which the first column is the signs / 4."""
    signs = np.sign(arrays(FOUROVERSIX)["rht/matrix_f32"][:, 0])
    return Hadamard(tuple(int(sign) for sign in signs))


def _fouroversix(peer: str, key: str) -> np.ndarray:
    parts = key.split("/")
    if parts[0] == "rht":
        return _rht(parts[1])
    if parts[0] == "api":
        return _fouroversix_api(peer, parts[1:])
    name, form, rule, tiles, order, what = parts
    if what == "amax_f32" and form == "mxfp4":
        # there is no global scale, which fouroversix reports as 1
        q = _fouroversix_quantize(peer, name, form, rule, tiles, order)
        return np.ones(1, np.float32) if q.global_scale is None else np.zeros(1, np.float32)
    if what == "amax_f32":
        return tensor_amax(_rotated(peer, name, order)).numpy()
    q = _fouroversix_quantize(peer, name, form, rule, tiles, order)
    return q.data.numpy() if what == "values" else q.scale.reshape(-1).numpy()


def _rotated(peer: str, name: str, order: str) -> torch.Tensor:
    x = source(peer, name)
    x = x.t() if order == "t" else x
    # the peer rounds rotated values to bfloat16, this library does not: so it is done outside
    return rotation().rotate(x) if name.endswith("_rht") else x


@functools.cache
def _fouroversix_quantize(peer: str, name: str, form: str, rule: str, tiles: str, order: str) -> BlockScaledTensor:
    options: dict[str, object] = {"block_2d": tiles == "2d", "scale_layout": "rowmajor"}
    rule = FOUR_SIX_RULES.get(rule, rule)
    given = re.search(r"_amax([\d.]+)$", name)
    if given:
        amax = torch.tensor(float(given[1]))
        options["global_scale"] = global_scale_from_amax(amax, resolve_rule(rule, NVFP4))
    if name.endswith("_rht"):
        return quantize(_rotated(peer, name, order), form, rule, **options)
    x = source(peer, name)
    if name.endswith("_stoch"):
        return _with_draws(lambda: quantize(x, form, rule, rounding="stochastic", generator=0, **options))
    return quantize(x, form, rule, transpose=order == "t", **options)


def _with_draws(run: Callable[[], BlockScaledTensor]) -> BlockScaledTensor:
    """``run`` with the peer's random numbers instead of Philox's: (blocks, 16) for each of two draws."""
    store = arrays(FOUROVERSIX)
    draws = [torch.from_numpy(store[f"stochastic/rand_{name}_f32"]).reshape(-1) for name in ("first", "second")]
    original = philox.uniform
    philox.uniform = lambda seed, index, stream: draws[stream][index]
    try:
        return run()
    finally:
        philox.uniform = original


def _fouroversix_api(peer: str, parts: list[str]) -> np.ndarray:
    name, form, rule, what = parts
    x = source(peer, name)
    step = 4 * formats.FORMATS[form].block
    if what == "amax_f32":
        return _fouroversix(peer, f"{name}/{form}/{rule}/1d/n/amax_f32")
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % step, 0, -x.shape[0] % 128))
    q = quantize(padded, form, FOUR_SIX_RULES.get(rule, rule))
    if what == "values":
        return q.data.numpy()
    if what == "scales_u8":
        return flat_blocked(q.scale)
    dtype = torch.bfloat16 if what.endswith("bf16") else torch.float32
    return dequantize(q, dtype, k=x.shape[1])[: x.shape[0]].float().numpy()


def _rht(what: str) -> np.ndarray:
    if what == "matrix_f32":
        return rotation().matrix().numpy()
    if what == "matrix_nosign_f32":
        return Hadamard((1,) * 16).matrix().numpy()
    w = source(FOUROVERSIX, "w_bf16")
    return rotation().rotate(w.t() if what.startswith("wT") else w).float().numpy()


def _hessian(block: int) -> torch.Tensor:
    """Of the peer's activations, from a float64 product: the same float32 numbers on every machine."""
    x = torch.from_numpy(arrays(QWANTIZE)["input/calib"]).double().unflatten(-1, (-1, block)).transpose(0, 1)
    return (x.transpose(1, 2) @ x).float()


@functools.cache
def _qwantize_quantize(name: str, function: str, block: str) -> BlockScaledTensor:
    kind, rule = function.removesuffix("_torch").split("_", 1)
    form = QWANTIZE_FORMATS[kind, block]
    x = source(QWANTIZE, name)
    options: dict[str, object] = {"global_scale": None, "scale_layout": "rowmajor"}
    if rule == "optimal_hessian":
        return quantize(x, form, "hessian", hessian=_hessian(int(block[1:])), **options)
    naive = "max" if kind == "nvfp4" else "floor"
    return quantize(x, form, naive if rule == "naive" else "optimal", **options)


def _qwantize(key: str) -> np.ndarray:
    if key == "tables/e4m3_positive_f32":
        return formats.decode_e4m3(torch.arange(1, 0x7F, dtype=torch.uint8)).numpy()
    if key == "hessian/calib_b16_f32":
        # a float32 product: its last bits are the BLAS's
        calib = torch.from_numpy(arrays(QWANTIZE)["input/calib"])
        got = quantize_request.hessian_blocks(calib, calib.shape[1], NVFP4, calib.device).numpy()
        want = arrays(QWANTIZE)[key]
        size = np.sqrt(np.einsum("gii->gi", want))
        return np.where(abs(got - want) <= len(calib) * 2.0**-24 * size[:, :, None] * size[:, None], want, got)
    name, function, block, what = key.split("/")
    q = _qwantize_quantize(name, function, block)
    if what == "scale_f32":
        return q.format.decode_scale(q.scale).numpy()
    return codes_of(q).reshape(q.rows, -1, q.format.block)


@functools.cache
def _torchao_quantize(name: str, form: str, dtype: str, mode: str) -> BlockScaledTensor:
    x = source(TORCHAO, name + ("_bf16" if dtype == "bf16" else ""))
    if form != "nvfp4":
        return quantize(x, MX_FORMATS[form], mode, scale_layout="rowmajor")
    scale = None
    if mode == "pts_amax":
        scale = torch.from_numpy(arrays(TORCHAO)[f"{name}/{form}/{dtype}/{mode}/pts_f32"])
    return quantize(x, "nvfp4", "max_normal", global_scale=scale, scale_layout="rowmajor")


def _torchao(key: str) -> np.ndarray:
    name, form, dtype, mode, what = key.split("/")
    if what == "pts_f32":
        x = source(TORCHAO, name + ("_bf16" if dtype == "bf16" else ""))
        return global_scale_from_amax(tensor_amax(x), resolve_rule("max", NVFP4)).numpy()
    q = _torchao_quantize(name, form, dtype, mode)
    if what == "values":
        return q.data.numpy()
    if what == "scales_u8":
        return q.scale.numpy()
    if what == "scales_swizzled_u8":
        return flat_blocked(to_blocked(q.scale)).reshape(32, 16)
    return dequantize(q).numpy()


def _torch(key: str) -> np.ndarray:
    store = arrays(TORCH)
    group, *rest = key.split("/")
    if group == "to_blocked":
        return _blocked_numbers(*map(int, rest[0].split("x")))
    simple: dict[str, Callable[[], torch.Tensor]] = {
        "cast/float8_e4m3fn_u8": lambda: formats.encode_e4m3(torch.from_numpy(store["cast/input_f32"])),
        "cast/float8_e5m2_u8": lambda: formats.encode_e5m2(torch.from_numpy(store["cast/input_f32"])),
        "cast/float8_e8m0fnu_u8": lambda: _to_e8m0(store["cast/input_f32"]),
        "cast_e8m0/u8": lambda: _to_e8m0(store["cast_e8m0/input_f32"]),
        "decode_e8m0/f32": lambda: formats.decode_ue8m0(torch.arange(256, dtype=torch.uint8)),
        "decode_e4m3/f32": lambda: formats.decode_e4m3(torch.arange(256, dtype=torch.uint8)),
        "fp4_cast/packed_u8": lambda: formats.pack_e2m1(
            formats.encode_e2m1(torch.from_numpy(store["fp4_cast/input_f32"]))
        ),
        "pack_uint4/out": lambda: formats.pack_e2m1(torch.from_numpy(store["pack_uint4/input"])),
        "sum_order/sum16_f32": lambda: ordered_sum(torch.from_numpy(store["sum_order/input16_f32"]).t()),
        "sum_order/sum256_f32": lambda: ordered_sum(torch.from_numpy(store["sum_order/input256_f32"]).t()),
    }
    if key in simple:
        return simple[key]().numpy()
    _, form, what = rest
    x = torch.from_numpy(store[f"input/{group}"])
    q = quantize(x, MX_FORMATS.get(form, form), scale_layout="rowmajor")
    return q.data.numpy() if what == "values" else q.scale.numpy()


def _to_e8m0(values: np.ndarray) -> torch.Tensor:
    return formats.encode_ue8m0(torch.from_numpy(values), rounding="rna")


def _blocked_numbers(rows: int, cols: int) -> np.ndarray:
    """The numbers 1 … rows · cols in the blocked layout, which takes bytes: the two bytes of each by themselves."""
    numbers = torch.arange(1, rows * cols + 1).reshape(rows, cols)
    low, high = (flat_blocked(to_blocked((numbers >> shift).to(torch.uint8))) for shift in (0, 8))
    return low.astype(np.int32) + 256 * high.astype(np.int32)


def case_of(peer: str, key: str) -> Case:
    """What the golden array ``key`` was made from."""
    parts = key.split("/")
    what = parts[-1]
    if peer == TORCH and parts[0] in ("cast", "cast_e8m0"):
        x = arrays(peer)[f"{parts[0]}/input_f32"].astype(np.float64)
        return Case(peer, key, "values", x.reshape(-1, 1), 1)
    if (peer == TORCH and not parts[1].startswith("to_mxfp")) or parts[0] in ("rht", "tables", "hessian"):
        return Case(peer, key, "values", np.zeros((1, 1)), 1)
    api_key = parts[0] == "api"
    name, form = parts[1:3] if api_key else parts[:2]
    x = _rotated(peer, name, parts[4]) if peer.startswith("fouroversix") and not api_key else source(peer, name)
    if peer == TORCHAO and parts[2] == "bf16":
        x = source(peer, name + "_bf16")
    block = 16 if form == "nvfp4" else 32
    if peer == QWANTIZE:
        block = int(parts[2][1:])
    tile = block if "2d" in parts else 1
    kind = "elements"
    if what.startswith("scale"):
        kind = "blocked" if api_key or "swizzled" in what else "scales"
    elif what in ("amax_f32", "pts_f32"):
        kind = "scalar"
    elif what.startswith("dequant"):
        kind = "values"
    if (api_key and kind != "values") or kind == "blocked":
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % (4 * block), 0, -x.shape[0] % 128))
    scale = 1.0
    if peer.startswith("fouroversix") and form == "nvfp4":
        given = re.search(r"_amax([\d.]+)$", name)
        amax = torch.tensor(float(given[1])) if given else tensor_amax(x)
        rule = parts[3 if api_key else 2]
        scale = float(global_scale_from_amax(amax, resolve_rule(FOUR_SIX_RULES.get(rule, rule), NVFP4)))
    return Case(peer, key, kind, x.to(torch.float64).numpy(), block, tile, scale)


def unrolled(case: Case, array: np.ndarray) -> np.ndarray:
    """Elements or scales in the order of the case's rows, flattened."""
    rows, k = case.x.shape
    packed = case.kind == "elements" and array.size * 2 == case.x.size
    if packed:
        return unpack_e2m1(torch.from_numpy(array.reshape(rows, -1))).numpy().reshape(-1)
    if case.kind == "blocked":
        return from_blocked(torch.from_numpy(array.reshape(-1)), rows, k // case.block).numpy().reshape(-1)
    if case.key.endswith("packed_u8"):
        return unpack_e2m1(torch.from_numpy(array)).numpy().reshape(-1)
    return array.reshape(-1)
