"""The programs of public libraries that are run in the simulator, with arguments that keep them small.

A line is a function of a driver in ``libraries`` and its arguments. Nothing of the libraries is kept here: they are
installed by ``pip install`` with the names and versions of ``PACKAGES``.
"""

from __future__ import annotations

from cutlass_programs import Program

PACKAGES = ("quack-kernels", "flash-attn-4", "flashinfer-python", "nvidia-cudnn-frontend")
OUT_OF_SCOPE = (
    "kernels made of wgmma (sm_90a), for sm_120a and sm_107a, for several GPUs, and those in CUDA C++ or Triton"
)

_QUACK = """
softmax m=16 n=512
softmax m=17 n=512
softmax m=4 n=16384 dtype=float32
softmax_backward m=16 n=512
rmsnorm m=16 n=1024
rmsnorm m=17 n=1024 dtype=float16 residual=True
rmsnorm_backward m=16 n=512
layernorm m=16 n=1024
layernorm_backward m=16 n=512
cross_entropy m=16 n=2048
cross_entropy m=17 n=512
cross_entropy_backward m=16 n=2048
linear_cross_entropy m=128 d=256 v=512
topk m=16 n=256 k=16
topk m=9 n=1024 k=32 softmax=True dtype=float32
topk_backward m=16 n=256 k=16
rotary b=2 s=33 h=2 d=64 rotary_dim=32
rotary b=1 s=16 h=4 d=128 rotary_dim=128 interleaved=True inplace=True
hadamard m=16 n=1024
hadamard m=5 n=300 dtype=float32
gemm m=256 n=256 k=256
gemm m=200 n=328 k=136 batch=2 bias=True
gemm m=256 n=256 k=128 dtype=float16 dynamic_scheduler=True
gemm_add m=256 n=256 k=128 alpha=0.5 beta=2.0
gemm_add m=256 n=256 k=128 inplace=True
gemm_act m=256 n=256 k=128 activation=gelu_tanh_approx
gemm_act m=256 n=256 k=128 activation=swiglu
gemm_dact m=256 n=256 k=128 activation=relu_sq
gemm_dact m=256 n=256 k=128 activation=swiglu
gemm_symmetric m=256 k=128
gemm_rms m=256 n=256 k=128
gemm_variable_m lengths=[100,156,40] n=256 k=128
gemm_variable_m lengths=[100,156,40] n=256 k=128 gather=True
gemm_variable_k lengths=[64,128,40] m=256 n=256
gemm_blockscaled m=256 n=256 k=256 fmt=nvfp4
gemm_blockscaled m=200 n=192 k=256 fmt=mxfp8
gemm_blockscaled m=256 n=256 k=256 fmt=mxfp4 batch=2
gemm_quantized_out m=256 n=256 k=128 fmt=nvfp4
gemm_quantized_out m=256 n=256 k=128 fmt=mxfp8_e4m3
gemm_split_k m=128 n=256 k=512 split_k=2 mode=SERIAL
gemm_split_k m=128 n=256 k=512 split_k=2 mode=PARALLEL
mlp m=128 d=128 hidden=256
"""
_FLASH_ATTENTION = """
forward
forward sq=256 sk=384 d=128 h=2 hk=1 causal=True
forward sq=200 sk=300 d=128 dtype=float16
forward sq=256 sk=512 window=(100,0)
forward sq=256 sk=256 softcap=15.0
forward sq=256 sk=256 sink=True h=2
forward sq=1 sk=512 h=8 hk=1 d=128 pack_gqa=True
forward sq=128 sk=512 num_splits=2 d=128
forward sq=256 sk=256 d=192 dv=128
forward sq=256 sk=256 d=256
forward sq=256 sk=256 d=96 causal=True
forward_varlen lengths_q=[100,156] lengths_k=[120,200] h=2 causal=True
forward_paged b=2 sq=2 pages=2 page=128
forward_score_mod
forward_block_sparse
combine
combine splits=5 b=1 s=17 d=128
backward
backward sq=128 sk=256 d=128 causal=True
backward h=2 hk=1 deterministic=True
backward sq=200 sk=300 h=2 hk=1 deterministic=True
backward sq=256 sk=256 causal=True deterministic=True
backward sq=200 sk=136 dtype=float16
autograd
"""
_FLASHINFER = """
rmsnorm m=16 n=1024
rmsnorm m=33 n=1024 dtype=float16
rmsnorm m=8 n=2048 gemma=True
rmsnorm_quant m=16 n=1024
fused_add_rmsnorm m=33 n=1024
layernorm m=16 n=1024
gated_residual_rmsnorm m=4
rmsnorm_sigmoid_gate m=9 heads=3
rmsnorm_fp4quant m=16 n=1024
rmsnorm_fp4quant m=16 n=1024 block=32
rmsnorm_fp4quant m=130 n=512 add=True swizzled=True
nvfp4_quantize m=130 n=512
mxfp4_quantize m=130 n=512 dtype=float16
mxfp8_quantize m=130 n=512
mxfp8_quantize m=16 n=512 swizzled=False
mm_fp4 m=128 n=256 k=256
mm_mxfp8 m=128 n=256 k=256
gemm_bf16 m=4 n=64 k=1024 how=direct
gemm_bf16 m=16 n=128 k=2048 how=splitk
gemm_bf16 m=4 n=128 k=2048 how=warp
grouped_gemm_fp8_contiguous groups=2 n=256 k=256
normalize_qk rows=9 heads=4 d=128
gdn_decode b=2 h=2 hv=4
gdn_decode b=2 h=2 hv=4 pretranspose=False
gdn_prefill lengths=[128,70]
gdn_prefill lengths=[192,70] parallel=True
recurrent_kda b=2 h=2
top_k_varlen rows=3 n=4096 k=64
top_k_varlen rows=2 n=8192 k=512 backend=gvr_2
fp8_paged_mqa_logits b=2 next_n=1 heads=64 blocks=4
moe_unpermute tokens=16 top_k=4 n=1024
"""
_CUDNN = """
gemm_amax m=128 n=128 k=256
gemm_swiglu m=128 n=128 k=128
gemm_swiglu m=256 n=256 k=128 tiler=(256,128) dtype=float16
grouped_gemm lengths=[256,256] n=256 k=128
compression_attention sq=256 sk=128
selection_attention s=256 blocks=2
topk_reduction sq=512 sk=128
rmsnorm_rht_amax m=4 n=2048
norm variant=rms_norm shape=[16,1024]
norm variant=layer_norm shape=[16,1024] backward=True
norm variant=group_norm shape=[2,16,8,8] backward=True
norm variant=instance_norm shape=[2,16,8,8]
norm variant=batch_norm shape=[2,16,8,8]
norm variant=rms_norm shape=[16,1024] backward=True
tail_rope tokens=9 heads=4 d=128
vision_rope_backward tokens=33
causal_conv1d_update n=5 d=256
causal_conv1d b=1 d=64 t=200
nvfp4_block_scale m=128 k=256
csa_compressor lengths=[64,36]
indexer_forward sq=128 sk=128
indexer_top_k rows=3 n=4096 k=64
compactify rows=5 k=128
sparse_attention_forward s=2 sk=256 k=128
"""
_LAST_STORE = "the last store of dK and dV is neither committed nor waited for"
_NO_FENCE = "no fence between an mbarrier.init and the bulk copy that signals it"
TRUE_HAZARDS = {
    "backward": _LAST_STORE,
    "backward sq=128 sk=256 d=128 causal=True": _LAST_STORE,
    "backward sq=200 sk=136 dtype=float16": _LAST_STORE,
    "backward sq=256 sk=256 causal=True deterministic=True": _LAST_STORE,
    "autograd": _LAST_STORE,
    "gdn_prefill lengths=[128,70]": "a warp frees tensor memory that three others may still load",
    "gdn_prefill lengths=[192,70] parallel=True": "a warp frees tensor memory that three others may still load",
    "selection_attention s=256 blocks=2": "lanes shuffle that are not in their member mask",
    "indexer_forward sq=128 sk=128": "tensor memory is freed when one warp of the four that load it has signed",
    "norm variant=group_norm shape=[2,16,8,8] backward=True": _NO_FENCE,
    "norm variant=instance_norm shape=[2,16,8,8]": _NO_FENCE,
    "norm variant=rms_norm shape=[16,1024] backward=True": _NO_FENCE,
    "norm variant=layer_norm shape=[16,1024] backward=True": _NO_FENCE,
    "gemm_amax m=128 n=128 k=256": "four warps free the tensor memory that one has allocated",
    "gemm_bf16 m=16 n=128 k=2048 how=splitk": "the allocating warp reads the address of its columns unordered",
    "fp8_paged_mqa_logits b=2 next_n=1 heads=64 blocks=4": "lanes read what others stored, and only shuffled between",
}
"""Programs that stop at a hazard that benchmarks/records/findings.md argues to be true, and a line of it."""
KNOWN = {
    "sparse_attention_forward s=2 sk=256 k=128": "tcgen05.mma.ws with A in tensor memory and M < 128 is not modelled",
}
"""Programs that do not pass, and why."""


def _programs(driver: str, lines: str) -> list[Program]:
    return [Program(driver, line, _expected(line), limit=600) for line in lines.strip().splitlines()]


def _expected(line: str) -> str:
    return f"true: {TRUE_HAZARDS[line]}" if line in TRUE_HAZARDS else KNOWN.get(line, "pass")


PROGRAMS = [
    *_programs("quack_programs.py", _QUACK),
    *_programs("flash_attention_programs.py", _FLASH_ATTENTION),
    *_programs("flashinfer_programs.py", _FLASHINFER),
    *_programs("cudnn_programs.py", _CUDNN),
]
