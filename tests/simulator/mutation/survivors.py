"""Mutants that nothing notices, and why: (kernel, kind, ordinal in the kernel) to the reason.

``HARMLESS``: proofs that the mutant is right too. ``NOT_NOTICED``: mutants that are wrong, or may be, and pass; the
run counts them as such.
"""

from __future__ import annotations

from .sites import Mutant

_Table = dict[tuple[str, str, int], str]

_SECOND_PAIR = (
    "A fence and a barrier of all threads follow the initialisation of the second pipeline, before anything uses "
    "either; they cover the first pipeline, for between the two stands nothing but the second's mbarrier.init."
)
_THIRD_BARRIER = (
    "bar.sync 1 of all 192 threads follows before anything uses an mbarrier; between the two stands only the "
    "allocation of tensor memory by warp 0."
)
_PERMIT = (
    "The permit matters to another CTA on the same SM that wants to allocate. The kernel allocates once, and its "
    "shared memory ({}) leaves no room for a second CTA; a CTA of another kernel would wait until this one ends, which"
    " changes no result."
)
_NOBODY_WAITS = (
    "Only the MMA warp waits on this mbarrier, once, before its first MMA, for the phase before the first: that wait "
    "is over before the store warps arrive, which they do after the MMAs. A CTA has one tile, so nobody waits again."
)
_FIRST_WAIT = (
    "The wait is for the phase before the first (parity 1 of a fresh mbarrier), which is over by definition, and each "
    "CTA executes it once."
)
_TAIL = (
    "The wait keeps the CTA alive until the tensor cores have left the stage. The store warps keep it alive longer: "
    "they wait for the accumulator of the last tile, which the same thread commits after all the commits that this "
    "wait waits for, and a commit arrives when all tcgen05 operations before it are over."
)
_HANDSHAKE = (
    "The wait keeps the even CTA alive until the store warps of both have released the accumulators. Before it ends, "
    "it waits for the other CTA's warp 0 at the mbarrier of the deallocation, which arrives there after a barrier of "
    "all its store warps behind their last release."
)
_BARRIER_BEFORE_FREE = (
    "Each tile ends with the same barrier of the same 128 threads, behind the tcgen05.wait::ld of its last load; "
    "between that one and this stands no tensor memory access, and a warp without a tile has none at all."
)
_SIZE_AS_BEFORE = (
    "The field has this value already: the map is a copy of the host's, whose tensor has one batch, size 1 in every "
    "dimension beyond its rank, and scales in atoms of 256 16-bit numbers 512 bytes apart, whatever the problem."
)
_STRIDE_OF_ONE = (
    "The stride belongs to a dimension of size 1, or beyond the rank; the coordinate there is always 0, and no address"
    " depends on it."
)
_FRESH = (
    "The wait is for the phase before the first of a ring that has more stages than the loop that waits has rounds, or "
    "of the one accumulator, as for the mbarrier behind it, on which nobody arrives before the end: it is over by "
    "definition, at any problem size."
)
_PEER_AT_THE_END = (
    "It waits for the other CTA's arrival at the mbarrier of the deallocation instead, which comes behind a barrier "
    "of all the warps there, after their releases; the warps of its own CTA meet at the barrier that follows."
)
_ALL_HAVE_LOADED = (
    "Warp 0 of the even CTA has waited for the accumulator to be released, by all 256 threads of both CTAs behind "
    "their last load; warp 0 of the odd one waits for it at the mbarrier of the deallocation."
)
_LATER_FENCE = (
    "The same threads execute the same fence again, after more mbarrier.init and before anything uses an mbarrier or "
    "meets another CTA."
)
_LATER_TAIL = (
    "Waits for the stages after this one follow, and the commits of each MMA thread arrive in the order in which the "
    "stages are left: the last of them covers this one."
)
_SAME_LANE = (
    "elect.sync elects the same lane each time, so one thread writes the map and replaces its fields; a barrier of the "
    "warp stands between that and the copy by the warp."
)
_TWO_FENCES = "Two of this fence follow one another directly; either does what both do."
_OTHER_STAGE = (
    "The next mbarrier is that of the stage which the next wait of the same loader waits for, with the same parity; "
    "so the wait comes one place early, which is harmless, as the order in which the stages are left is the order of "
    "the commits. In the last stage of the ring it is the accumulator's: at these sizes a phase that is sure to come,"
    " and otherwise a Deadlock, as for the last of these waits, where it is noticed."
)

_GEMM_PERMIT = (
    "Another CTA on the same SM that wants to allocate waits until this one ends, which it does: it waits for no other."
)
_GEMM_TAIL = (
    "The wait keeps the CTA alive until all MMAs that read its stages have done with them. The epilogue keeps it alive "
    "longer: it waits for the last accumulator, which the same thread commits after the stages, in a pair for both."
)
_GEMM_ALIGNED = (
    "All lanes have executed tcgen05.wait::ld.sync.aligned together, and what the arrival announces, that they have "
    "read the accumulator, was over then."
)
_GEMM_MET_BEFORE = (
    "A barrier of the warp stands before the arrival of the lane that is elected here again; between the two barriers, "
    "nobody does anything but that."
)
_READ_BY_WGMMA = (
    "The bytes of x that are copied over have been read by wgmma alone, through the asynchronous proxy, which the copy "
    "goes through too."
)
_GEMM_STORED = (
    "A piece of output ends with a barrier of all threads of the epilogue, behind the tcgen05.wait::ld of the piece; "
    "between the last one and this stands no use of tensor memory."
)
_GEMM_LOADED = (
    "The loading warp has nothing to do after it but to meet its own CTA, whose other warps have waited for the same "
    "phase, and a thread that has arrived may exit."
)
_GEMM_NEXT_LAUNCH = (
    "Nobody in this launch looks at a flag again that has been lowered; the next launch on the stream comes after all "
    "of this one."
)
_SAME_SCALES = "A warp has 16 rows, so that the lanes of both thread-ids load the same words (``WarpTile.sfa_offset``)."
_SM120 = tuple(f"sm_120a {name}" for name in ("gemm", "wide", "stream_k", "mxfp8", "gated", "groups"))
_GEMM = tuple(f"gemm {name}" for name in ("plain", "pair", "multicast", "split_k", "stream_k", "mxfp8"))
_GEMM_STORES = ("gemm plain", "gemm mxfp8")

_SM120_TAIL = (
    "The loader waits at its end until every stage was released. Those who release are warps of the same CTA, which "
    "stays until they have; nobody else touches its mbarriers, and the warps have waited for all copies."
)

_FENCED_BY_LOADERS = (
    "A barrier of all threads follows the initialisation, and the warps that copy execute fence.proxy.async between it "
    "and their first copy: that makes the mbarriers visible to the asynchronous proxy. No other CTA uses them."
)

_WGMMA = tuple(f"wgmma{name}" for name in ("", " split_k", " gated", " groups"))
_ALL_FOLLOW = (
    "A barrier of all threads, or of all of the cluster, follows at once. The lane that has initialised the mbarriers "
    "arrives there too; the others have nothing to tell."
)
_CLUSTER_HAS_MET = (
    "All threads of the cluster have just met at its barrier, and since then none has written anything: one has "
    "fetched a tensor map ahead."
)
_FEWER_REGISTERS = (
    "The registers of PTX are virtual: without the instruction ptxas makes do with those that the warps have from the "
    "start. Nobody waits for what they do not take, and results do not depend on it."
)
_ONE_TILE = (
    "A plan with split_k has a cluster for each tile (planning refuses others), so that no loader waits for the stage "
    "of a tile's last step."
)
_LOADERS_END = (
    "The loaders have nothing to do after it. The others of the CTA wait for the same phase before they use memory of "
    "other CTAs, and a thread that has arrived may exit."
)
_WGMMA_BETWEEN = (
    "Between what the lanes have read of the last piece of a tile and what they store next lie the products of the "
    "next tile: all lanes issue a wgmma behind their loads and wait for it, and what they had loaded has been read "
    "then (docs/explanation/checks.md, Warpgroups)."
)

_NOT_WRITTEN = (
    "It loads a tensor of the caller (scales, sizes, offsets, pointers), which no instruction of the launch writes; "
    "mutants that load what the launch has written are noticed."
)
_OWN_MAP = (
    "Each CTA changes maps of its own, by the warp that uses them: every thread that the fences are for is in the CTA."
)
_LATER_MEETING = "The cluster meets once more before anybody touches memory or an mbarrier of another CTA."

HARMLESS: _Table = {
    **{("group", "load as constant", n): _NOT_WRITTEN for n in range(1, 19)},
    **{("group", "scope of the CTA", n): _OWN_MAP for n in range(1, 9)},
    **{("pair", "drop cluster meeting", n): _LATER_MEETING for n in (1, 2)},
    **{(k, "scope of the CTA", 3): _GEMM_NEXT_LAUNCH for k in ("stream", "stream gated")},
    ("gemm stream_k", "scope of the CTA", 4): _GEMM_NEXT_LAUNCH,
    **{(k, "the other space", 2): _READ_BY_WGMMA for k in _WGMMA},
    **{(k, "load as constant", 1): _NOT_WRITTEN for k in _WGMMA},
    **{(k, "load as constant", n): _NOT_WRITTEN for k in ("wgmma gated", "wgmma groups") for n in (2, 3, 4)},
    **{("stream", "load as constant", n): _NOT_WRITTEN for n in (1, 3)},
    **{("stream gated", "load as constant", n): _NOT_WRITTEN for n in (1, 2, 3, 4, 7, 8, 9, 10)},
    **{(k, "drop warp barrier", 1): _ALL_FOLLOW for k in _WGMMA},
    **{(k, "drop barrier", 1): _CLUSTER_HAS_MET for k in ("wgmma", "wgmma gated")},
    **{(k, "drop setmaxnreg", 2): _FEWER_REGISTERS for k in _WGMMA},
    **{(k, "drop fence", 3): _READ_BY_WGMMA for k in _WGMMA},
    ("wgmma gated", "drop warp barrier", 3): _WGMMA_BETWEEN,
    ("wgmma groups", "drop warp barrier", 9): _WGMMA_BETWEEN,
    ("wgmma split_k", "drop arrive", 2): _ONE_TILE,
    ("wgmma split_k", "drop cluster wait", 1): _LOADERS_END,
    **{(k, "drop fence", 1): _FENCED_BY_LOADERS for k in ("stream", "stream gated", "wgmma groups")},
    ("gemm split_k", "drop warp barrier", 1): _GEMM_MET_BEFORE,
    **{(k, "drop wait", n): _SM120_TAIL for k in _SM120 for n in (2, 3)},
    **{(k, "scales of other rows", n): _SAME_SCALES for k in _SM120 if k != "sm_120a wide" for n in range(1, 33)},
    **{("sm_120a gated", "scales of other rows", n): _SAME_SCALES for n in range(33, 65)},
    **{(k, "drop tcgen05.relinquish_alloc_permit", 1): _GEMM_PERMIT for k in _GEMM_STORES},
    **{(k, "drop wait", 2): _GEMM_TAIL for k in _GEMM if k != "gemm multicast"},
    **{(k, "wait for the next barrier", 2): _OTHER_STAGE for k in _GEMM},
    **{(k, "drop warp barrier", 1): _GEMM_ALIGNED for k in _GEMM if k not in ("gemm split_k", "gemm stream_k")},
    ("gemm split_k", "drop warp barrier", 2): _GEMM_ALIGNED,
    ("gemm stream_k", "drop warp barrier", 3): _GEMM_ALIGNED,
    ("gemm stream_k", "flag without release", 2): _GEMM_NEXT_LAUNCH,
    ("gemm plain", "drop barrier", 7): _GEMM_STORED,
    ("gemm mxfp8", "drop barrier", 15): _GEMM_STORED,
    ("gemm multicast", "drop barrier", 7): _GEMM_STORED,
    ("gemm split_k", "drop cluster wait", 2): _GEMM_LOADED,
    ("gemm", "drop fence", 1): _SECOND_PAIR,
    ("gemm", "drop barrier", 1): _SECOND_PAIR,
    ("gemm", "drop barrier", 2): _THIRD_BARRIER,
    ("gemm", "drop tcgen05.relinquish_alloc_permit", 1): _PERMIT.format("144 of 227 KiB"),
    ("gemm", "drop arrive", 1): _NOBODY_WAITS,
    ("gemm", "arrives twice", 1): _NOBODY_WAITS,
    **{("gemm", "drop wait", n): _TAIL for n in (2, 3, 4, 5)},
    ("gemm", "drop wait", 6): _FIRST_WAIT,
    ("dual", "drop fence", 1): _SECOND_PAIR,
    ("dual", "drop barrier", 1): _SECOND_PAIR,
    ("dual", "drop barrier", 2): _THIRD_BARRIER,
    ("dual", "drop tcgen05.relinquish_alloc_permit", 1): _PERMIT.format("162 of 227 KiB"),
    ("dual", "drop arrive", 1): _NOBODY_WAITS,
    ("dual", "arrives twice", 1): _NOBODY_WAITS,
    **{("dual", "drop wait", n): _TAIL for n in (2, 3, 4)},
    ("dual", "drop wait", 5): _FIRST_WAIT,
    **{("dual", "wait for the next barrier", n): _OTHER_STAGE for n in (2, 3)},
    ("pair", "drop tcgen05.relinquish_alloc_permit", 1): _PERMIT.format("177 of 227 KiB"),
    **{("pair", "drop wait", n): _TAIL for n in (2, 3, 4, 5)},
    ("pair", "drop wait", 8): _HANDSHAKE,
    ("pair", "drop barrier", 6): _BARRIER_BEFORE_FREE,
    ("group", "drop tcgen05.relinquish_alloc_permit", 1): _PERMIT.format("145 of 227 KiB"),
    ("group", "drop warp barrier", 1): _SAME_LANE,
    ("group", "drop wait", 2): _TAIL,
    **{("gemm", "wait for the next barrier", n): _OTHER_STAGE for n in (2, 3, 4)},
    **{("pair", "wait for the next barrier", n): _OTHER_STAGE for n in (2, 3, 4)},
    **{("group", "drop tensormap.replace", n): _SIZE_AS_BEFORE for n in (5, 7, 9, 12, 14, 17, 19)},
    **{("group", "drop tensormap.replace", n): _SIZE_AS_BEFORE for n in (25, 27, 29, 32, 34, 37, 39)},
    **{("group", "drop tensormap.replace", n): _STRIDE_OF_ONE for n in (6, 8, 10, 18, 20, 26, 28, 30, 38, 40)},
    **{("cutlass-blockscaled-2cta", "drop fence", n): _TWO_FENCES for n in (1, 2)},
    **{("cutlass-blockscaled-2cta", "drop wait", n): _TAIL for n in range(4, 11)},
    **{("cutlass-blockscaled-2cta", "wait for the next barrier", n): _OTHER_STAGE for n in range(4, 9)},
    ("cutlass-blockscaled-2cta", "drop wait", 15): _HANDSHAKE,
    ("cutlass-blockscaled-2cta", "drop barrier", 5): _BARRIER_BEFORE_FREE,
    ("cutlass-blockscaled-2cta", "drop tcgen05.relinquish_alloc_permit", 1): _PERMIT.format("221 of 227 KiB"),
    **{("cutlass-nvfp4_gemm_1", "drop wait", n): _FRESH for n in (1, 2)},
    **{("cutlass-nvfp4_gemm_1", "wait for the next barrier", n): _FRESH for n in (1, 2)},
    **{("cutlass-nvfp4_gemm_1", "drop wait", n): _TAIL for n in range(6, 11)},
    **{("cutlass-nvfp4_gemm_1", "wait for the next barrier", n): _OTHER_STAGE for n in range(6, 10)},
    ("cutlass-nvfp4_gemm_1", "wait for the next barrier", 11): _PEER_AT_THE_END,
    ("cutlass-nvfp4_gemm_1", "drop barrier", 2): _ALL_HAVE_LOADED,
    ("cutlass-fp16_gemm_5", "drop fence", 1): _LATER_FENCE,
    **{("cutlass-fp16_gemm_5", "drop wait", n): _LATER_TAIL for n in range(9, 18)},
    **{("cutlass-fp16_gemm_5", "wait for the next barrier", n): _LATER_TAIL for n in range(9, 16)},
}

NOT_NOTICED: _Table = {}


def explained(kernel: str, mutant: Mutant) -> tuple[str, str]:
    """("harmless" or "known to pass", reason) of a mutant that nothing notices, or two empty strings."""
    key = kernel, mutant.kind, mutant.ordinal
    if key in HARMLESS:
        return "harmless", HARMLESS[key]
    return ("known to pass", NOT_NOTICED[key]) if key in NOT_NOTICED else ("", "")
