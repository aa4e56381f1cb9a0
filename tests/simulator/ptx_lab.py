"""Small PTX kernels for the tests: one instruction applied to arrays, and whole kernels with a launch made by hand."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim import GlobalMemory, Launch, Program, run

_NAMES = "abcdefgh"


def launch_kernel(
    ptx: str, tensors: list, scalars: list[bytes] = (), *, grid=(1, 1, 1), block=(32, 1, 1), readonly=(), **options
):
    """Runs the only kernel of ``ptx`` with the tensors' addresses and ``scalars`` as parameters; returns the
    ``Result``."""
    program = Program.parse(ptx)
    (name,) = program.kernels
    memory = GlobalMemory()
    params = []
    for j, t in enumerate(tensors):
        memory.add(t, f"t{j}", writable=j not in readonly)
        params.append(int(t.ctypes.data).to_bytes(8, "little"))
    # Snippets of code are tried for their values; tests of the checks ask for them.
    options.setdefault("checks", False)
    smem, cluster = options.pop("smem", 0), options.pop("cluster", (1, 1, 1))
    launch = Launch(name, grid, block, (*params, *scalars), cluster, dynamic_smem=smem)
    return run(program, launch, memory, **options)


def module(body: str, params: int, declarations: str = "", scalars: int = 0) -> str:
    """A module with one kernel that has loaded its pointer parameters into %p0, %p1, ... and its u32 scalars into
    %s0, ..."""
    names = [f".param .u64 p{j}" for j in range(params)] + [f".param .u32 s{j}" for j in range(scalars)]
    loads = "".join(f"ld.param.b64 %p{j}, [p{j}];\n" for j in range(params))
    loads += "".join(f"ld.param.b32 %s{j}, [s{j}];\n" for j in range(scalars))
    return f"""
.version 8.8
.target sm_100a
.address_size 64
.visible .entry kernel({", ".join(names)})
{{
  .reg .b64 %p<{params + 1}>;
  .reg .b32 %s<{scalars + 1}>;
  .reg .b32 %r<32>; .reg .b64 %rd<32>; .reg .b16 %h<16>; .reg .pred %q<16>;
  {declarations}
  {loads}
  {body}
  ret;
}}
"""


def apply(code: str, inputs: list[np.ndarray], outputs: list[str]) -> list[np.ndarray]:
    """Runs ``code`` for every element: inputs in %a, %b, ..., results taken from %x, %y, ... of the numpy types
    ``outputs``.

    8-bit inputs and outputs are in 16-bit registers.
    """
    n = len(inputs[0])
    padded = -(-n // 64) * 64
    arrays = [np.concatenate([i, np.resize(i, padded - n)]) if padded > n else np.ascontiguousarray(i) for i in inputs]
    results = [np.zeros(padded, o) for o in outputs]
    lines, declared = (
        ["mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.s32 %r4, %r2, %r3, %r1;"],
        [],
    )
    for j, (array, name) in enumerate(zip(arrays, _NAMES)):
        size = array.dtype.itemsize
        declared.append(f".reg .b{max(16, 8 * size)} %{name};")
        lines.append(f"mad.wide.u32 %rd{j}, %r4, {size}, %p{j}; ld.global.b{8 * size} %{name}, [%rd{j}];")
    for j, result in enumerate(results):
        declared.append(f".reg .b{max(16, 8 * result.itemsize)} %{'xyzw'[j]};")
    lines.append(code)
    for j, result in enumerate(results):
        k, size = len(arrays) + j, result.itemsize
        lines.append(f"mad.wide.u32 %rd{k}, %r4, {size}, %p{k}; st.global.b{8 * size} [%rd{k}], %{'xyzw'[j]};")
    text = module("\n".join(lines), len(arrays) + len(results), " ".join(declared))
    launch_kernel(text, [*arrays, *results], grid=(padded // 64, 1, 1), block=(64, 1, 1))
    return [r[:n] for r in results]


def edges(bits: int, signed: bool, count: int = 200, seed: int = 0) -> np.ndarray:
    """Random integers of every magnitude with the extremes among them."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(f"{'i' if signed else 'u'}{bits // 8}")
    raw = rng.integers(0, 2**64, count, dtype=np.uint64) >> rng.integers(0, 64, count, dtype=np.uint64)
    special = [0, 1, 2, 2**bits - 1, 2**bits - 2, 2 ** (bits - 1), 2 ** (bits - 1) - 1, 2 ** (bits - 1) + 1]
    values = np.concatenate([np.array(special, np.uint64), raw])
    return rng.permutation((values & np.uint64(2**bits - 1)).astype(f"u{bits // 8}")).view(dtype)


def float_edges(dtype: str, count: int = 400, seed: int = 0) -> np.ndarray:
    """Random floats by bit pattern (so that subnormals, infinities and NaNs come) and near one another."""
    rng = np.random.default_rng(seed)
    size = np.dtype(dtype).itemsize
    bits = rng.integers(0, 2 ** (8 * size), count, dtype=f"u{size}", endpoint=False)
    near = rng.standard_normal(count).astype(dtype)
    special = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 0.5, 1.5, 2.5, 255.5, -2.5], dtype)
    tiny = np.array([1, 2, 3], f"u{size}").view(dtype)
    return rng.permutation(np.concatenate([bits.view(dtype), near, special, tiny, -tiny]))


def wait(address: str, parity: str) -> str:
    """The loop that the DSL emits for a blocking wait."""
    return (
        "{ .reg .pred P; LAB_WAIT: mbarrier.try_wait.parity.shared::cta.b64 P, ["
        + address
        + "], "
        + parity
        + ", 10000000; @P bra DONE; bra LAB_WAIT; DONE: }"
    )
