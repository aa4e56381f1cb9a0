"""A router's choice: the experts of each token with the largest logits, and their weights, in one pass.

A warp has a token, and each of its lanes keeps every 32nd logit in registers. A key is an integer in the order of the
scores. The lanes agree on one expert after the other: the one with the largest key and, among equal keys, with the
lowest index. Lane i keeps choice i.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32

from ...ptx.arithmetic import add_rn, div_rn, mul_rn, sub_rn
from ...ptx.move import f32_bits
from ...ptx.warp import max_lanes, sum_lanes
from ..arith import div, mod
from ..gemm.gates import exp2
from .config import LEAST_SUM, THREADS, WARP, RouteArguments, RouteConfig

_LOG2_E = math.log2(math.e)
NAN_KEY = 0xFFFFFFFF
"""The key of NaN, the largest one, as in ``torch.topk``."""
NO_KEY = 0
"""The key of an expert that does not exist or was chosen before: smaller than that of any number."""


class Choice(NamedTuple):
    """A candidate: the key of its score, its expert, and its logit."""

    key: Uint32
    expert: Int32
    logit: Float32

    def or_better(self, other: Choice) -> Choice:
        """The choice with the larger key; of equal keys, this one."""
        more = other.key > self.key
        return Choice(*(cutlass.select_(more, theirs, own) for own, theirs in zip(self, other)))


def key_of(score: Float32) -> Uint32:
    """An integer key in the order of float32 scores. Both zeros have the same key."""
    # −0 + 0 is 0
    bits = f32_bits(add_rn(score, Float32(0.0)))
    negative = Uint32(0) - (bits >> 31)
    return cutlass.select_(score == score, bits ^ (negative | Uint32(1 << 31)), Uint32(NAN_KEY))


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + exp(−x))."""
    return div_rn(Float32(1.0), add_rn(Float32(1.0), exp2(mul_rn(x, Float32(-_LOG2_E)))))


class Route:
    """The host function and the kernel of one :class:`RouteConfig`."""

    def __init__(self, config: RouteConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: RouteArguments, stream: CUstream):
        """Launches a warp for each token."""
        grid = (cute.ceil_div(arguments.tokens, THREADS // WARP), 1, 1)
        self.kernel(arguments).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, arguments: RouteArguments):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        token, lane = cta * (THREADS // WARP) + div(thread, WARP), mod(thread, WARP)
        if token < arguments.tokens:
            logits = self.logits(arguments, token, lane)
            keys = self.keys(arguments, logits, lane)
            own, largest = self.chosen(keys, logits, arguments.top, lane)
            weight = self.weight(own.logit, largest, logits, lane < arguments.top, arguments.scale)
            if lane < arguments.top:
                places = cute.make_layout((arguments.tokens, arguments.top), stride=(arguments.top, 1))
                mIds = cute.make_tensor(arguments.ids, places)  # (TOKENS, TOP)
                mWeights = cute.make_tensor(arguments.weights, places)  # (TOKENS, TOP)
                mIds[token, lane] = mIds.element_type(own.expert)
                mWeights[token, lane] = mWeights.element_type(weight)

    def logits(self, arguments: RouteArguments, token: Int32, lane: Int32) -> list[Float32]:
        """A lane's logits, of experts 32 apart; −∞ beyond the last expert."""
        row = cute.make_tensor(arguments.logits + Int64(token) * arguments.stride, cute.make_layout(arguments.experts))
        return [
            cutlass.select_(e < arguments.experts, Float32(row[cutlass.min(e, arguments.experts - 1)]), -Float32.inf)
            for e in self.experts(lane)
        ]

    def experts(self, lane: Int32) -> list[Int32]:
        """The experts of a lane."""
        return [lane + WARP * i for i in range(self.config.per_lane)]

    def keys(self, arguments: RouteArguments, logits: list[Float32], lane: Int32) -> cute.Tensor:
        """The keys of a lane's experts, by which the warp chooses."""
        cfg, experts = self.config, self.experts(lane)
        # softmax and sigmoid both keep the order of the logits
        scores = logits
        if cfg.corrected:
            bias = cute.make_tensor(arguments.correction, cute.make_layout(arguments.experts))  # (EXPERTS)
            added = [bias[cutlass.min(e, arguments.experts - 1)] for e in experts]
            scores = [add_rn(sigmoid(x), y) for x, y in zip(logits, added)]
        keys = cute.make_rmem_tensor(cfg.per_lane, Uint32)
        for i, (expert, score) in enumerate(zip(experts, scores)):
            keys[i] = cutlass.select_(expert < arguments.experts, key_of(score), Uint32(NO_KEY))
        return keys

    @cute.jit
    def chosen(self, keys: cute.Tensor, logits: list[Float32], top: Int32, lane: Int32):
        """The lane's choice, and the logit of the first choice. All lanes of a warp call this together."""
        experts = self.experts(lane)
        expert, logit, largest = Int32(0), Float32(0.0), Float32(0.0)
        for i in cutlass.range(top, unroll=1):
            best = Choice(keys[0], experts[0], logits[0])
            for j in cutlass.range_constexpr(1, self.config.per_lane):
                best = best.or_better(Choice(keys[j], experts[j], logits[j]))
            largest_key = max_lanes(best.key)
            # among equal keys, the lowest expert has the largest complement
            complement = cutlass.select_(best.key == largest_key, ~Uint32(best.expert), Uint32(0))
            winner = Int32(~max_lanes(complement))
            of_winner = cute.arch.shuffle_sync(best.logit, mod(winner, WARP))
            expert = cutlass.select_(lane == i, winner, expert)
            logit = cutlass.select_(lane == i, of_winner, logit)
            largest = cutlass.select_(i == 0, of_winner, largest)
            for j in cutlass.range_constexpr(self.config.per_lane):
                keys[j] = cutlass.select_(experts[j] == winner, Uint32(NO_KEY), keys[j])
        return Choice(Uint32(0), expert, logit), largest

    def weight(
        self, logit: Float32, largest: Float32, logits: list[Float32], is_choice: cutlass.Boolean, scale: Float32
    ) -> Float32:
        """The weight of a lane's choice, whose logit is ``logit``."""
        cfg = self.config
        if cfg.scoring == "sigmoid":
            score = sigmoid(logit)
            if not cfg.renormalized:
                return mul_rn(score, scale)
            total = sum_lanes(cutlass.select_(is_choice, score, Float32(0.0)), WARP)
            return div_rn(mul_rn(score, scale), add_rn(total, Float32(LEAST_SUM)))

        def power(x: Float32) -> Float32:
            return exp2(mul_rn(sub_rn(x, largest), Float32(_LOG2_E)))

        score = power(logit)
        if cfg.renormalized:
            # in a renormalized softmax, the experts that are not chosen cancel out
            total = sum_lanes(cutlass.select_(is_choice, score, Float32(0.0)), WARP)
        else:
            total = Float32(0.0)
            for x in logits:
                total = add_rn(total, power(x))
            total = sum_lanes(total, WARP)
        return div_rn(mul_rn(score, scale), total)
