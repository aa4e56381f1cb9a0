"""Records the results of the copies in ``tma_cases`` on a GPU of compute capability 9.0, byte for byte, and their
faults.

    python tests/gpu/record_tma.py --out tests/data/h200_tma.npz [--compare tests/data/h200_tma.npz]

It needs the CUDA driver and numpy, and nothing of the package. A fault ends the context, and with it the process:
another process continues. ``--compare`` says which cases differ from those of an earlier recording.

For case n the recording has ``n.map``, words 0 to 7 of the tensor map, with addresses relative to the tensor;
``n.out``, what a load leaves in shared memory, a reduction in memory, tensormap.replace in the map; for a reduction
``n.before`` and ``n.src``; for a store ``n.change``, memory before xor after.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from async_kernels import text
from async_kernels.case import Case, Pointer, TensorMap
from async_kernels.descriptor import KINDS
from async_kernels.device import Device, DriverError
from tma_cases import SIZE, all_cases

FAULTS = {715: "illegal instruction", 716: "misaligned address"}
GUARD = 0xEE
_NOISE, _LOADED, _STORED, _SMEM = 65536, 8192, 16384, 65536
_PATIENCE = 300


def noise(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def tensor_map(case: dict, buffer: int) -> TensorMap:
    im = case.get("im2col")
    rank = len(case["dims"])
    corners = {"lower": tuple(im["lower"]), "upper": tuple(im["upper"]), "pixels": im["pixels"]} if im else {}
    return TensorMap(
        kind=list(KINDS)[case["type"]],
        dims=tuple(case["dims"]),
        strides=tuple(case["strides"]),
        box=(im["channels"],) if im else tuple(case["box"]),
        steps=tuple(case.get("estr", [1] * rank)),
        **{"swizzle": case.get("swz", 0), "l2": case.get("l2", 0), "fill": case.get("oob", 0)},
        **{"buffer": buffer, "offset": case.get("base", 0)},
        **corners,
    )


def _list(values: list[int]) -> str:
    return "{" + ", ".join(map(str, values)) + "}"


def load_kernel(case: dict) -> Case:
    """The kernel of a load: it fills shared memory, loads one box, and copies shared memory to buffer 0; buffer 1 is
    the tensor."""
    rank, im = len(case["dims"]), "im2col" in case
    mode, info = ("im2col", f", {_list(case['offs'])}") if im else ("tile", "")
    data = noise(_NOISE, 1)
    if "values" in case:
        data = np.resize(np.array(case["values"], np.uint32).view(np.uint8), _NOISE)
    bar = text.at(_LOADED)
    copy = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.{mode}.mbarrier::complete_tx::bytes"
    lines = [
        f"mbarrier.arrive.expect_tx.shared.b64 _, {bar}, {case['tx']};",
        f"add.u32 %r1, %base, {case.get('off', 0)};",
        f"{copy} [%r1], [%m0, {_list(case['coords'])}], {bar}{info};",
    ]
    body = [text.fill(0, _LOADED, GUARD), text.elected([text.init(_LOADED), text.INIT_FENCE]), text.PROXY_FENCE]
    body += ["bar.sync 0;", text.elected(lines), text.wait(_LOADED), text.dump(0, _LOADED)]
    module = text.module("\n  ".join(body), 1, 1)
    arguments = [Pointer(0), tensor_map(case, 1)]
    return Case("load", module, [np.zeros(_LOADED, np.uint8), data], arguments, smem=_SMEM)


def _paired(pairs: list, size: int, before: int, source: int) -> tuple[np.ndarray, np.ndarray]:
    """(what memory holds, what is stored): the pairs, repeated."""
    values = np.array(pairs, np.uint64).astype(f"u{size}")
    return tuple(np.resize(values[:, i], n // size).view(np.uint8).copy() for i, n in enumerate((before, source)))


def store_kernel(case: dict) -> Case:
    """The kernel of a store: it copies buffer 0 to shared memory, and stores one box of it to the tensor, buffer 1."""
    total, size = case.get("total", _LOADED), case.get("gbytes", _STORED)
    data, source = noise(size, 2), noise(total, 3)
    if "pairs" in case:
        data, source = _paired(case["pairs"], SIZE[case["type"]], size, total)
    rank, operation = len(case["dims"]), case.get("op", "")
    verb, suffix = ("cp.reduce", f".{operation}") if operation else ("cp", "")
    copy = f"{verb}.async.bulk.tensor.{rank}d.global.shared::cta{suffix}.{case.get('mode', 'tile')}.bulk_group"
    lines = [f"add.u32 %r1, %base, {case.get('off', 0)};", f"{copy} [%m0, {_list(case['coords'])}], [%r1];"]
    return _out(case["kind"], total, [*lines], [source, data], [Pointer(0), tensor_map(case, 1)], maps=1)


def reduction_kernel(case: dict) -> Case:
    """The kernel of a reduction: it reduces buffer 0 into buffer 1 without a tensor map."""
    size = -(-len(case["pairs"]) * case["size"] // 16) * 16
    data, source = _paired(case["pairs"], case["size"], size, size)
    line = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{case['op']} [%p1], [%base], {size};"
    return _out("bulkred", size, [line], [source, data], [Pointer(0), Pointer(1)], maps=0)


def _out(name: str, size: int, lines: list[str], buffers: list, arguments: list, maps: int) -> Case:
    lines += ["cp.async.bulk.commit_group;", "cp.async.bulk.wait_group 0;"]
    body = [text.bring(0, size), text.PROXY_FENCE, "bar.sync 0;", text.elected(lines)]
    module = text.module("\n  ".join(body), len(arguments) - maps, maps)
    return Case(name, module, buffers, arguments, smem=_SMEM)


def replace_kernel(case: dict) -> Case:
    """The kernel of tensormap.replace: it copies the map to shared memory, replaces one field, and copies it to buffer
    0."""
    values = "mov.u32 %r9, 0x1234; mov.u64 %rd9, 0x123456789AB0; mov.u32 %r4, %base;"
    body = [text.bring(0, 128, "%m0").replace("ld.global", "ld"), "bar.sync 0;", "{ .reg .b64 %rd<10>;", values]
    body += [text.elected(f"tensormap.replace.{case['ins']};"), "}", "bar.sync 0;", text.dump(0, 128)]
    module = text.module("\n  ".join(body), 1, 1)
    return Case("replace", module, [np.zeros(128, np.uint8)], [Pointer(0), tensor_map(case, 0)], smem=_SMEM)


KERNELS = {"load": load_kernel, "store": store_kernel, "bulkred": reduction_kernel, "replace": replace_kernel}


def _words(raw: bytes, base: int) -> np.ndarray:
    """Words 0 to 7 of a map, its address relative to the tensor's."""
    words = np.frombuffer(raw, np.uint64)[:8].copy()
    words[0] -= np.uint64(base)
    return words


def record(device: Device, case: dict) -> dict[str, np.ndarray]:
    """The arrays of one case. Raises ``DriverError`` if the case faults."""
    if case["kind"] == "encode":
        address = device.base.value
        spec = tensor_map(case, 0)
        return {"map": _words(device.encode(spec, address + spec.offset), address)}
    text.restart_labels()
    kernel = KERNELS[case["kind"]](case)
    placed = device.place(kernel)
    after = device.run(kernel, device.kernel(kernel))
    found = {}
    for raw, address in device.maps(kernel, placed):
        found["map"] = _words(raw, address)
        if case["kind"] == "replace":
            base = 0 if "global_address" in case["ins"] else address
            return found | {"out": _words(after[0].tobytes(), base)}
    if case["kind"] == "load":
        return found | {"out": after[0]}
    if "pairs" in case:
        return found | {"before": kernel.buffers[1], "src": kernel.buffers[0], "out": after[1]}
    return found | {"change": after[1] ^ kernel.buffers[1]}


def work(first: int, out: Path) -> None:
    """Records the cases from ``first`` on, up to the first that faults."""
    device = Device()
    for n, case in enumerate(all_cases()[first:], first):
        try:
            result = {"fault": "", "arrays": record(device, case)}
        except DriverError as error:
            if error.code not in FAULTS:
                raise
            result = {"fault": FAULTS[error.code], "arrays": {}}
        (out / f"{n}.pickle").write_bytes(pickle.dumps(result))
        if result["fault"]:
            return


def collect(out: Path) -> tuple[list[dict], dict[str, np.ndarray]]:
    cases, arrays = all_cases(), {}
    done = 0
    while done < len(cases):
        command = [sys.executable, __file__, "--worker", str(done), "--out", str(out)]
        subprocess.run(command, check=True, timeout=_PATIENCE)
        while (out / f"{done}.pickle").exists():
            result = pickle.loads((out / f"{done}.pickle").read_bytes())
            cases[done]["fault"] = result["fault"]
            if "pairs" in cases[done]:
                cases[done]["pairs"] = 1
            arrays |= {f"{done}.{name}": value for name, value in result["arrays"].items()}
            done += 1
    return cases, arrays


def differences(cases: list[dict], arrays: dict[str, np.ndarray], path: Path) -> list[str]:
    """The cases and arrays that differ from the recording at ``path``."""
    with np.load(path) as old:
        before = json.loads(bytes(old["cases"]))["cases"]
        wrong = [f"case {n}: {a} was {b}" for n, (a, b) in enumerate(zip(cases, before)) if a != b]
        names = (set(old.files) - {"cases"}) ^ set(arrays)
        wrong += [f"{name} is in one of the two" for name in sorted(names)]
        same = sorted(set(old.files) & set(arrays))
        return wrong + [f"{name} differs" for name in same if not np.array_equal(old[name], arrays[name])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--worker", type=int)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.worker, arguments.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        cases, arrays = collect(Path(folder))
    smi = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True
    )
    name, driver = smi.stdout.decode().splitlines()[0].split(", ")
    about = f"{name}, driver {driver}, {datetime.date.today().isoformat()}"
    wrong = differences(cases, arrays, arguments.compare) if arguments.compare else []
    print(f"{len(cases)} cases, {sum(bool(c['fault']) for c in cases)} faults, {len(wrong)} differences")
    print("\n".join(wrong))
    header = np.frombuffer(json.dumps({"device": about, "cases": cases}).encode(), np.uint8)
    np.savez_compressed(arguments.out, cases=header, **arrays)


if __name__ == "__main__":
    main()
