"""The CuTe DSL programs of NVIDIA/cutlass that are run in the simulator, with arguments that keep them small.

Paths are below ``examples/python/CuTeDSL``. Nothing of CUTLASS is kept here: a checkout is needed to run them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Program:
    """One program: ``limit`` in seconds; ``expect`` is "pass", or why it does not.

    ``shows`` must be in its output where its exit status does not tell; ``checked`` is False for programs that check
    nothing themselves, which do not count as evidence.
    """

    path: str
    arguments: str = ""
    expect: str = "pass"
    limit: int = 300
    arch: str = "sm_100a"
    shows: str = ""
    checked: bool = True


def _each(folder: str, *programs: str | tuple[str, str], **more: Any) -> list[Program]:
    """Programs of one folder: a name, or a name and its arguments; ``more`` is said of all of them."""
    pairs = [(p, "") if isinstance(p, str) else p for p in programs]
    return [Program(f"{folder}/{name}.py", arguments, **more) for name, arguments in pairs]


_ONCE = "--warmup_iterations 0 --iterations 1"
_F16 = "--ab_dtype Float16 --c_dtype Float16 --acc_dtype Float32"
_2CTA = "--mma_tiler_mn 256,128 --cluster_shape_mn 2,1 --use_2cta_instrs"
_NVFP4 = "--sf_dtype Float8E4M3FN --sf_vec_size 16 --c_dtype Float16"
_FP8 = "--ab_dtype Float8E4M3FN --c_dtype BFloat16 --acc_dtype Float32 --scale_dtype Float32"

TUTORIALS = [
    *_each(
        "cute/blackwell/tutorial/tutorial_gemm",
        ("fp16_gemm_0", "--mnk 256,512,256"),
        ("fp16_gemm_1", "--mnk 512,512,256"),
        ("fp16_gemm_2", "--mnk 512,512,256"),
        ("fp16_gemm_3", "--mnk 512,512,256"),
        ("fp16_gemm_3_1", "--mnk 512,512,256"),
        ("fp16_gemm_4", "--mnk 512,512,256"),
        ("fp16_gemm_5", "--mnk 512,512,256"),
        ("fp16_gemm_6", "--mnk 256,512,128"),
        ("nvfp4_gemm_0", "--mnkl 256,256,512,2"),
        ("nvfp4_gemm_1", "--mnkl 256,256,512,2"),
    ),
    *_each(
        "cute/blackwell/tutorial/tutorial_tma",
        ("tma_v0", "--M 256 --N 128 --num_warmup 0 --num_iters 1"),
        ("tma_v1", "--num_warmup 0 --num_iters 1"),
        ("tma_v2", "--num_warmup 0 --num_iters 1"),
        shows="Verification: PASSED",
    ),
]

KERNELS = [
    *_each(
        "cute/blackwell/kernel/dense_gemm",
        ("dense_gemm", f"{_F16} {_2CTA} --mnkl 512,256,256,1 --use_tma_store {_ONCE}"),
        ("dense_gemm_persistent", f"{_F16} {_2CTA} --mnkl 512,256,256,1 --use_tma_store {_ONCE}"),
        ("dense_gemm_persistent_dynamic", f"{_F16} {_2CTA} --mnkl 512,256,256,1 --use_tma_store {_ONCE}"),
        ("dense_gemm_persistent_prefetch", f"{_F16} {_2CTA} --mnkl 512,256,256,1 --use_tma_store {_ONCE}"),
        ("dense_gemm_software_pipeline", f"{_F16} {_2CTA} --mnkl 512,256,256,1 --use_tma_store {_ONCE}"),
        (
            "dense_gemm_alpha_beta_persistent",
            f"{_F16} --d_dtype Float16 --epi_dtype Float32 {_2CTA} --mnkl 512,256,256,1 --alpha 2.0 --beta 1.0 {_ONCE}",
        ),
    ),
    *_each(
        "cute/blackwell/kernel/blockscaled_gemm",
        (
            "dense_blockscaled_gemm_persistent",
            f"--a_dtype Float4E2M1FN --b_dtype Float4E2M1FN {_NVFP4} --mma_tiler_mn 256,128 --cluster_shape_mn 2,1"
            f" --mnkl 512,256,512,1 {_ONCE}",
        ),
        (
            "dense_blockscaled_gemm_persistent_amax",
            f"--ab_dtype Float4E2M1FN {_NVFP4} --mma_tiler_mn 128,128 --cluster_shape_mn 1,1"
            f" --mnkl 256,256,512,1 {_ONCE}",
        ),
        (
            "dense_blockscaled_gemm_persistent_prefetch",
            f"--ab_dtype Float4E2M1FN {_NVFP4} --mma_tiler_mn 256,128 --cluster_shape_mn 2,1"
            f" --mnkl 512,256,512,1 {_ONCE}",
        ),
    ),
    Program(
        "cute/blackwell/kernel/blockscaled_gemm/sm103_dense_blockscaled_gemm_persistent.py",
        f"--ab_dtype Float4E2M1FN {_NVFP4} --mma_tiler_mn 128,128 --cluster_shape_mn 1,1 --mnkl 256,256,768,1 {_ONCE}",
        arch="sm_103a",
    ),
    *_each(
        "cute/blackwell/kernel/blockscaled_grouped_gemm",
        (
            "grouped_blockscaled_gemm",
            f"--ab_dtype Float4E2M1FN {_NVFP4} --mma_tiler_mn 128,128 --cluster_shape_mn 1,1 --num_groups 2"
            f" --problem_sizes_mnkl (128,256,256,1),(72,128,512,1) {_ONCE}",
        ),
    ),
    *_each(
        "cute/blackwell/kernel/grouped_gemm",
        (
            "grouped_gemm",
            f"{_F16} --mma_tiler_mn 128,64 --cluster_shape_mn 1,1 --num_groups 2 --tensormap_update_mode SMEM"
            f" --problem_sizes_mnkl (128,192,64,1),(40,128,128,1) {_ONCE}",
        ),
    ),
    *_each(
        "cute/blackwell/kernel/blockwise_gemm",
        (
            "blockwise_gemm",
            f"{_FP8} --mma_tiler_mn 128,128 --cluster_shape_mn 1,1 --mnkl 256,256,256,1 {_ONCE}",
        ),
        (
            "contiguous_grouped_gemm",
            f"{_FP8} --mma_tiler_mn 128,128 --cluster_shape_mn 1,1 --mnkl 128,256,256,2 {_ONCE}",
        ),
    ),
    Program(
        "cute/blackwell/kernel/blockwise_gemm/masked_grouped_gemm.py",
        f"{_FP8} --mma_tiler_mn 128,128 --cluster_shape_mn 1,1 --mnkl 128,256,256,2 {_ONCE}",
        expect="its scheduler warp reads one element past the table of group sizes, after the last tile",
    ),
    *_each(
        "cute/blackwell/kernel/mixed_input_gemm",
        (
            "mixed_input_gemm",
            "--a_dtype Int8 --b_dtype BFloat16 --scale_granularity_m 0 --scale_granularity_k 0 --c_dtype BFloat16"
            f" --acc_dtype Float32 --mma_tiler_mnk 128,128,64 --cluster_shape_mn 1,1 --mnkl 256,256,256,1 {_ONCE}",
        ),
        (
            "grouped_mixed_input_gemm",
            "--a_dtype Int8 --b_dtype BFloat16 --scale_granularity_m 0 --scale_granularity_k 0 --c_dtype BFloat16"
            f" --acc_dtype Float32 --mma_tiler_mnk 128,128,64 --cluster_shape_mn 1,1 --mnkl 256,256,256,1 {_ONCE}",
        ),
    ),
    *_each(
        "cute/blackwell/kernel/attention/fmha",
        (
            "fmha",
            "--qk_acc_dtype Float32 --pv_acc_dtype Float32 --mma_tiler_mn 128,128 --q_shape 1,256,1,64"
            f" --k_shape 1,256,1,64 --is_persistent {_ONCE}",
        ),
        (
            "fmha_bwd",
            "--s_q 128 --s_k 128 --h_q 1 --h_k 1 --d 128 --b 1 --element_dtype Float16 --acc_dtype Float32"
            f" --mma_tiler_mn 128,128 {_ONCE}",
        ),
    ),
    *_each(
        "cute/blackwell/kernel/rmsnorm",
        ("rmsnorm", "--M 16 --N 1024 --dtype BFloat16"),
    ),
]

ATTENTION = [
    *_each(
        "cute/blackwell/kernel/attention/mla",
        (
            "mla_decode_fp16",
            "--batch_size 1 --latent_dim 512 --rope_dim 64 --num_heads 128 --seq_len_q 1 --seq_len_k 256"
            f" --in_dtype Float16 --out_dtype Float16 --acc_dtype Float32 --lse_dtype Float32 --is_persistent {_ONCE}",
        ),
        (
            "mla_decode_fp8",
            "--batch_size 1 --latent_dim 512 --rope_dim 64 --num_heads 128 --seq_len_q 1 --seq_len_k 256"
            " --in_dtype Float8E4M3FN --out_dtype Float8E4M3FN --acc_dtype Float32 --lse_dtype Float32 --is_persistent"
            f" {_ONCE}",
        ),
    ),
    *_each("cute/blackwell/kernel/attention/mamba2_ssd", ("mamba2_ssd", "--gbehcdln 2,2,2,4,2,64,128,128")),
    *_each(
        "cute/blackwell/kernel/attention/mixed_input_fmha",
        ("mixed_input_fmha_decode", "--b 1 --s 512 --h_q 8 --h_k 1"),
        ("mixed_input_fmha_prefill_d256", "--q_shape 1,1,256,256 --k_shape 1,1,256,256"),
        ("mixed_input_fmha_prefill_d512", "--q_shape 1,1,256,512 --k_shape 1,1,256,512"),
    ),
]

MOE = [
    *_each(
        "cute/blackwell/kernel/moe",
        ("torch_grouped_mm", "--tokens 64 --experts 3 --top_k_select 2 --hidden 256 --intermediate 256"),
        ("torch_scaled_grouped_mm", "--tokens 64 --experts 3 --top_k_select 2 --hidden 256 --intermediate 256"),
    ),
]

_EFC = (
    f"{_F16} --d_dtype Float16 --epi_dtype Float32 --mma_tiler_mn 128,128 --cluster_shape_mn 2,1 --mnkl 256,256,128,1"
)
EPILOGUES = [
    *_each(
        "cute/blackwell/efc",
        ("custom_epilogue_dense_gemm", f"{_EFC} --use_2cta_instrs --alpha 2.0 --beta 1.0 --x_factor 3.0 {_ONCE}"),
        ("activation_custom_epilogue_dense_gemm", f"{_EFC} --activation relu --use_2cta_instrs {_ONCE}"),
        (
            "synthetic_custom_epilogue_dense_gemm",
            "--ab_dtype Float16 --acc_dtype Float32 --mma_tiler_mn 128,128 --cluster_shape_mn 2,1 --mnkl 256,256,128,1"
            f" --use_2cta_instrs --alpha 2.0 --beta 1.0 --read_tensors 2 --written_tensors 3 {_ONCE}",
        ),
    ),
]

_UE8M0 = "--sf_vec_size 32 --sf_dtype Float8E8M0FNU --mnkl 128,128,256,1"
_PAIRS = (("8E4M3FN", "8E4M3FN"), ("8E5M2", "8E5M2"), ("4E2M1FN", "8E4M3FN"), ("8E4M3FN", "4E2M1FN"))
_SCALED = (_UE8M0, *(f"{_UE8M0} --a_dtype Float{a} --b_dtype Float{b}" for a, b in _PAIRS))
GEFORCE = _each(
    "cute/blackwell_geforce/kernel",
    *(
        (f"blockscaled_gemm/dense_blockscaled_gemm_persistent_{variant}", arguments)
        for variant, k in (("cooperative", 256), ("pingpong", 128))
        for arguments in ("--mnkl 256,256,256,1", f"--mnkl 256,128,512,2 --tile_shape_mnk 128,128,{k}", *_SCALED)
    ),
    ("dense_gemm/dense_gemm", "--mnkl 256,256,128,1"),
    ("dense_gemm/dense_gemm", "--mnkl 256,192,128,2 --a_major m --b_major n --c_major m"),
    arch="sm_120a",
)

HOPPER = [
    *_each(
        "cute/hopper/kernel/dense_gemm",
        ("dense_gemm", f"--mnkl 256,256,256,1 --tile_shape_mn 128,128 --cluster_shape_mn 2,2 {_ONCE}"),
        ("dense_gemm_persistent", f"--mnkl 512,256,512,1 --tile_shape_mn 128,256 --cluster_shape_mn 2,1 {_ONCE}"),
        ("dense_gemm_fp8_2xacc", f"--mnkl 256,256,256,1 --tile_shape_mn 128,128 --cluster_shape_mn 2,1 {_ONCE}"),
        (
            "dense_gemm_fp8_gelu_persistent",
            f"--mnkl 256,256,256,1 --tile_shape_mn 128,128 --cluster_shape_mn 2,1 {_ONCE}",
        ),
        arch="sm_90a",
    ),
    # Its benchmark frees the tensors of its groups before it launches.
    *_each(
        "cute/hopper/kernel/grouped_gemm",
        (
            "grouped_gemm",
            "--num_groups 2 --problem_sizes_mnkl (128,192,64,1),(40,128,128,1) --tile_shape_mn 128,64 --iterations 0",
        ),
        arch="sm_90a",
    ),
    *_each(
        "cute/hopper/kernel/attention", ("fmha", f"--q_shape 1,256,2,64 --k_shape 1,256,2,64 {_ONCE}"), arch="sm_90a"
    ),
    *_each("cute/hopper/kernel/cta_norm", ("cta_norm", f"--M 16 --N 1024 {_ONCE}"), arch="sm_90a"),
]

AMPERE = [
    *_each(
        "cute/ampere/kernel/elementwise",
        ("elementwise_add", "--M 128 --N 256"),
        ("elementwise_apply", "--M 128 --N 256"),
    ),
    *_each("cute/ampere/tutorial", ("elementwise_add_autotune", "--M 128 --N 256")),
    *_each(
        "cute/ampere/kernel/dense_gemm",
        ("sgemm", f"--mnk 256,256,64 {_ONCE}"),
        ("tensorop_gemm", f"--mnkl 256,256,128,1 {_ONCE}"),
    ),
    *_each(
        "cute/ampere/kernel/attention",
        ("flash_attention_v2", f"--batch_size 1 --seqlen_q 128 --seqlen_k 128 --num_head 1 {_ONCE}"),
        ("hstu_attention", "--batch_size 1 --seqlen_q 128 --seqlen_kv 128 --num_head 1"),
    ),
    *_each("cute_ext/ampere", "memcpy_simt_universal_copy"),
]

PRIMITIVES = [
    *_each(
        "experimental/primitives",
        *("async_pipeline", "bar_warp_sync", "barrier_cta_red", "barrier_cta_sync", "basic_types", "cp_async_bulk"),
        *("cp_async_bulk_prefetch", "cp_async_mbarrier_arrive_cluster", "cp_async_mbarrier_arrive_cta"),
        *("cp_async_shared_global", "cp_async_shared_global_swizzled", "elect_sync", "ldmatrix_stmatrix", "mapa"),
        *("mbarrier", "mbarrier_lifecycle", "pipeline_software_fill", "red", "redux_sync", "shfl_sync", "vote_sync"),
        "warp_named_barrier",
    ),
    *_each(
        "experimental/primitives/reduction",
        *("block_smem_reduce", "cluster_smem_reduce", "cluster_tmem_reduce", "thread_vector_reduce"),
        "warp_vector_reduce",
    ),
    *_each(
        "experimental/primitives/tma",
        *("tma_1cta_mbarrier", "tma_load_store", "tma_load_to_ldmatrix", "tma_multicast", "tma_pipeline_count2"),
        *("tma_pipeline_pingpong", "tma_pipeline_single_warp", "tma_pipeline_warpspec", "tma_store"),
        *("tma_swizzle_modes", "tma_tensormap_replace"),
    ),
    *_each(
        "experimental/primitives/tcgen05",
        *("1cta_mma_a_from_tmem", "1cta_mma_basic", "1cta_mma_mn_major", "1cta_mma_pipeline", "2cta_mma_basic"),
        *("2cta_mma_blockscale_m128", "2cta_mma_tma_store", "clusterMxN_2cta_mma", "cp_narrow_a_to_tmem_mma"),
        *("mcast_clusterMxN_1cta_mma", "mcast_clusterMxN_2cta_mma", "slicek_m32n8k128", "tmem_ld_st"),
        "tmem_ld_to_stmatrix_transpose",
    ),
    *_each(
        "experimental/primitives/tutorial",
        *("02_naive_gemm", "03_gemm_tiled_smem", "05_minimal_tensor_mma", "07_vectorized_array"),
        *("10_minimal_tensor_mma_fp8", "gemm_M128_N128_Kany_TN_warpspec_multistage"),
    ),
    *_each("experimental/primitives/tutorial", "06_softmax", shows="\nPASS"),
    *_each("experimental/primitives/tutorial", "01_hello_world", shows="PASS tidx=3 meta_arg=10 dynamic_arg=20"),
    *_each(
        "experimental/primitives/tutorial", "04_tma_load", "08_mlir_value_tree_debug", "09_tma_4d_to_2d", checked=False
    ),
]

_ORDER = "compares f16 sums of random normals with cuBLAS at 1e-5: passes only with the same order of summation"
LANGUAGE = [
    *_each(
        "dsl_tutorials",
        *("cooperative_launch", "dataclass_immutable", "inline_ptx"),
        *("launch_completion_and_programmatic_events", "programmatic_dependent_launch", "smem_allocator"),
    ),
    *_each("dsl_tutorials", "dynamic_smem_size", "torch_fake_tensor", checked=False),
    *_each("dsl_tutorials", "call_bypass_dlpack", "call_from_jit", expect=_ORDER),
    *_each("dsl_tutorials/tvm_ffi", "ampere_gemm_with_fake_tensor", expect=_ORDER),
    *_each("dsl_tutorials/tvm_ffi", "compile_with_fake_tensor", "jit_and_use_in_torch", checked=False),
    *_each(
        "dsl_tutorials/tvm_ffi", "error_reporting", expect="ends with the ValueError it demonstrates", checked=False
    ),
    *_each("cute/tvm_ffi", "fp4_x2_tensor"),
]

EXTENSION = [
    *_each(
        "cute_ext/blackwell",
        *(
            "dense_gemm",
            "dense_gemm_2sm",
            "dense_gemm_ptr_array",
            "dense_block_scaled_gemm",
            "dense_gemm_cute_pipeline",
        ),
    ),
    *_each(
        "experimental/task_scheduling/blackwell/tutorial",
        *("01_copy_basics_ts/01_copy_grid_stride", "01_copy_basics_ts/02_copy_tma"),
        "02_gemm_simple_ts/01_fp16_bf16_gemm_3",
        *("03_persistent_scheduling_dynamic_domain_ts/01_copy_persistent_skip_tile",),
        *("03_persistent_scheduling_dynamic_domain_ts/02_copy_varlen_dynamic_domain",),
    ),
]

OTHER_VERSION = "does not compile with nvidia-cutlass-dsl 4.8.1: a variable changes its type in a branch"
EXTENSION += _each(
    "experimental/task_scheduling/blackwell/tutorial/05_gemm_nvfp4_ts", "01_gemm_nvfp4", expect=OTHER_VERSION
)

_HANDSHAKE = "a CTA of the pair frees tensor memory without waiting for the other one's last loads"
_FMHA, _TCGEN05 = "cute/blackwell/kernel/attention", "experimental/primitives/tcgen05"
_MIXED = f"{_FMHA}/mixed_input_fmha/mixed_input_fmha"
_TMA, _LESSONS = "cute/blackwell/tutorial/tutorial_tma", "experimental/primitives/tutorial"
_PRIMITIVES, _TASKS = "experimental/primitives", "experimental/task_scheduling/blackwell/tutorial"
FINDINGS = {
    f"{_TMA}/tma_v0.py": "its bulk store is never committed nor waited for",
    f"{_TMA}/tma_v1.py": "its bulk store is never committed nor waited for",
    f"{_MIXED}_decode.py": "no fence between an mbarrier.init and the TMA that signals it",
    f"{_MIXED}_prefill_d256.py": "a warp frees tensor memory that others may still load",
    f"{_MIXED}_prefill_d512.py": "S and a stage of O share columns, and nothing orders them",
    f"{_PRIMITIVES}/mapa.py": "a CTA exits while its peer may still read its shared memory",
    f"{_PRIMITIVES}/tma/tma_multicast.py": "a relaxed cluster arrive, which releases nothing, announces the tile",
    f"{_PRIMITIVES}/tma/tma_pipeline_single_warp.py": "no bar.warp.sync between the lanes' reads and the next load",
    f"{_TCGEN05}/2cta_mma_basic.py": _HANDSHAKE,
    f"{_TCGEN05}/2cta_mma_tma_store.py": _HANDSHAKE,
    f"{_TCGEN05}/clusterMxN_2cta_mma.py": _HANDSHAKE,
    f"{_TCGEN05}/mcast_clusterMxN_2cta_mma.py": _HANDSHAKE,
    "cute_ext/blackwell/dense_gemm_2sm.py": _HANDSHAKE,
    "cute/hopper/kernel/dense_gemm/dense_gemm_fp8_2xacc.py": "nothing orders its stream after the copy of its scales",
    "cute/hopper/kernel/attention/fmha.py": "its last bulk store is not waited for",
    f"{_TCGEN05}/2cta_mma_blockscale_m128.py": "nobody waits for the scales that the odd CTA loads",
    f"{_TCGEN05}/mcast_clusterMxN_1cta_mma.py": "a CTA exits while its peer's multicast commit may still arrive",
    f"{_LESSONS}/gemm_M128_N128_Kany_TN_warpspec_multistage.py": "no barrier between alloc and reads of its address",
    f"{_LESSONS}/06_softmax.py": "the scratch buffer is used again without a barrier",
    f"{_TASKS}/02_gemm_simple_ts/01_fp16_bf16_gemm_3.py": "not all warps that use the mbarriers meet after their init",
    "dsl_tutorials/smem_allocator.py": "it prints shared memory that nobody has written",
}
"""What the checks find in programs whose own checks pass with ``--no-checks``: read as real in their source or PTX."""

REASONS = {
    f"{_PRIMITIVES}/reduction/cluster_tmem_reduce.py": "waits for tcgen05.cp by tcgen05.wait::st, and reads too early",
    f"{_FMHA}/fmha/fmha_bwd.py": "tensor memory is freed while the last dQ product may be under way; here it is",
    "dsl_tutorials/cooperative_launch.py": "launches more cooperative CTAs than a B200 holds",
    "cute/blackwell/kernel/moe/torch_scaled_grouped_mm.py": "its reference is a torch operation without a CPU version",
}

_ALL = TUTORIALS + KERNELS + ATTENTION + MOE + EPILOGUES + GEFORCE + HOPPER + AMPERE + PRIMITIVES + LANGUAGE + EXTENSION
PROGRAMS = [
    replace(p, expect=f"checks: {FINDINGS[p.path]}" if p.path in FINDINGS else REASONS.get(p.path, p.expect))
    for p in _ALL
]
