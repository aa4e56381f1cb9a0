"""Expert parallelism: each rank holds some of the experts, and rows travel to the ranks of the experts they chose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import NVFP4
from cute_nvfp4.nn.shard import common_global_scale
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.dequantize import dequantize
from cute_nvfp4.ops.moe.experts import Experts
from cute_nvfp4.ops.moe.layer import moe
from cute_nvfp4.ops.moe.maps import Maps, routing_maps
from cute_nvfp4.ops.moe.rows import combined, gathered
from cute_nvfp4.ops.quantize import quantize
from cute_nvfp4.runtime.backend import Backend
from cute_nvfp4.weight_shards import shard_stack

ROWS = ("16 bits", "nvfp4")
"""The forms in which rows travel: in 16 bits, or quantized to NVFP4, which takes 0.28 of the bytes."""
_WORDS = 4
"""Messages are multiples of so many 32-bit words: kernels read 16 bytes at a time."""


def shard_experts(experts: Experts, rank: int, count: int) -> Experts:
    """The experts of rank ``rank`` of ``count``, in order, as views of all experts.

    Raises:
        OperandError: the experts do not divide by the ranks.
    """
    found = {name: shard_stack(getattr(experts, name), rank, count) for name in ("gate_up", "down")}
    for name in ("gate_up_factor", "down_factor", "gate_up_bias", "down_bias"):
        every = getattr(experts, name)
        found[name] = None if every is None else every.chunk(count)[rank].contiguous()
    return replace(experts, **found)


class Exchange(NamedTuple):
    """Which rows travel where. maps: routing maps of (token, rank). sent, received: how many rows this rank sends to,
    and receives from, each rank."""

    maps: torch.Tensor
    sent: list[int]
    received: list[int]


class Messages(NamedTuple):
    """Rows with their ids and weights.

    words: int32 (rows, words): the words of the row, of its scales, the ids, the weights, and zeros. scale: the global
    scale of rows in NVFP4, which is the same on all ranks.
    """

    words: torch.Tensor
    scale: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class ExpertParallel:
    """A mixture of experts that lie on the ranks of a group; it computes ``moe`` for the rows of each rank.

    experts: those of this rank (``shard_experts``); every rank has equally many, and rank r has the ids r · E to
        (r + 1) · E - 1.
    group: the ranks; None: all.
    rows: "16 bits", or "nvfp4": rows are quantized before they travel and decoded where they arrive. Results travel in
        the dtype of x.
    global_scale: that of rows in NVFP4, equal on all ranks; None: each call computes it, with a collective of one
        value.

    A row travels once to each rank that has some of its experts, in one message with its ids and weights. The rank
    returns the weighted sum of its experts, rounded to the dtype of x; the sums of all ranks are added in rank order,
    in float32.
    """

    experts: Experts
    group: dist.ProcessGroup | None = None
    rows: str = "16 bits"
    global_scale: torch.Tensor | None = None
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        if self.rows not in ROWS:
            raise OperandError.of("rows of an exchange", got=repr(self.rows), expected=" or ".join(map(repr, ROWS)))
        step = 4 * NVFP4.block if self.rows == "nvfp4" else 2
        if self.experts.hidden % step:
            what = f"elements of a row that travels as {self.rows}"
            raise OperandError.of(what, got=self.experts.hidden, expected=f"a multiple of {step}: whole words")

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return dist.get_world_size(self.group)

    @property
    def first(self) -> int:
        """The id of this rank's first expert."""
        return dist.get_rank(self.group) * self.experts.count

    def __call__(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        exchange: Exchange | None = None,
    ) -> torch.Tensor:
        """The result (T, H) for this rank's rows (T, H), their experts' ids (T, k) and weights (T, k), T ≥ 1.

        Every rank must call it, with rows of its own. exchange: from ``exchange`` for these ids; with it the host reads
        no value, and a CUDA graph may record the call. Ids that are no expert's are left out.
        """
        exchange = self.exchange(topk_ids) if exchange is None else exchange
        messages = self.dispatch(x, topk_ids, topk_weights, exchange)
        results = self.compute(messages, x.dtype, topk_ids.shape[1])
        return self.combine(results, exchange, len(x))

    def all_gathered(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Computes what a call does, for equally many rows on each rank: every row goes to every rank, and a
        reduce-scatter adds the results, in the dtype of x. The host reads nothing: a CUDA graph takes any routing."""
        words, scale = self._messages(x, topk_ids, topk_weights)
        every = words.new_empty((self.ranks * len(words), words.shape[1]))
        _all_gather(every, words, group=self.group)
        results = self.compute(Messages(every, scale), x.dtype, topk_ids.shape[1])
        out = torch.empty_like(x)
        _reduce_scatter(out, results, group=self.group)
        return out

    def exchange(self, topk_ids: torch.Tensor) -> Exchange:
        """Which rows travel where. The ranks tell one another how many, and the host waits for that."""
        ranks = torch.arange(self.ranks, device=topk_ids.device)
        owner = torch.div(topk_ids, self.experts.count, rounding_mode="floor")
        wanted = (owner[:, :, None] == ranks).any(1)
        # in these maps a rank is an expert, and each token may choose every rank
        ids = torch.where(wanted, ranks, -1).to(torch.int32)
        maps = routing_maps(ids, self.ranks, 0, None, self.backend)
        sent = Maps.of(maps, self.ranks).offsets.diff()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return Exchange(maps, *torch.stack((sent, received)).tolist())

    def dispatch(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, exchange: Exchange
    ) -> Messages:
        """The messages for this rank's experts, those from rank 0 first."""
        words, scale = self._messages(x, topk_ids, topk_weights)
        # the kernel that gathers rows moves bytes
        ordered = gathered(words.view(torch.bfloat16), exchange.maps, self.ranks, self.ranks, None, self.backend)
        ordered = ordered[: sum(exchange.sent)].view(torch.int32)
        return Messages(self._sent(ordered, exchange.sent, exchange.received), scale)

    def compute(self, messages: Messages, dtype: torch.dtype, top: int) -> torch.Tensor:
        """The weighted sums (rows, H) of this rank's experts for each message, in the dtype of the rows."""
        words, scale = messages
        if not len(words):
            return torch.empty((0, self.experts.hidden), dtype=dtype, device=words.device)
        row, scales = self._words
        ids = words[:, row + scales :][:, :top]
        weights = words[:, row + scales + top :][:, :top].view(torch.float32)
        x = words[:, :row].view(dtype if scale is None else torch.uint8)
        if scale is not None:
            scales_of = words[:, row : row + scales].view(torch.uint8)
            x = dequantize(BlockScaledTensor(x, scales_of, scale), dtype, backend=self.backend)
        return moe(x, ids, weights, self.experts, offset=self.first, backend=self.backend)

    def combine(self, results: torch.Tensor, exchange: Exchange, tokens: int) -> torch.Tensor:
        """The result (T, H): sends the results (rows, H) of the received messages back, and adds them."""
        back = self._sent(results, exchange.received, exchange.sent)
        if not len(back):
            return back.new_zeros((tokens, self.experts.hidden))
        out = back.new_empty((tokens, self.experts.hidden))
        return combined(back, None, None, exchange.maps, self.ranks, self.ranks, None, out, self.backend)

    @property
    def _words(self) -> tuple[int, int]:
        """The 32-bit words of a row, and of its scales."""
        hidden = self.experts.hidden
        return (hidden // 8, hidden // (4 * NVFP4.block)) if self.rows == "nvfp4" else (hidden // 2, 0)

    def _messages(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> Messages:
        """The message of each row."""
        scale, parts = None, [x.detach()]
        if self.rows == "nvfp4":
            scale = common_global_scale(x, "max", self.group) if self.global_scale is None else self.global_scale
            a = quantize(x, "nvfp4", global_scale=scale, scale_layout="rowmajor", backend=self.backend)
            parts = [a.data, a.scale]
        parts += [topk_ids.to(torch.int32), topk_weights.detach().to(torch.float32)]
        words = [part.contiguous().view(torch.int32) for part in parts]
        if padding := -sum(part.shape[1] for part in words) % _WORDS:
            words.append(words[0].new_zeros((len(x), padding)))
        return Messages(torch.cat(words, dim=1), scale)

    def _sent(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Sends ``rows``, ``sent[i]`` of them to rank i, and returns what the ranks send."""
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self.group)
        return out


def _named(*names: str) -> Callable[..., None]:
    """The first of these functions that torch.distributed has; the last is that of torch before 2.13."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


def _all_gather(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    _named("all_gather_single", "all_gather_into_tensor")(out, x, group=group)


def _reduce_scatter(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    _named("reduce_scatter_single", "reduce_scatter_tensor")(out, x, group=group)
