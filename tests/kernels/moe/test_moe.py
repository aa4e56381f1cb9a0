"""moe in the simulator and on a GPU: random layers against float64, schedules and mutants."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from cutlass import Float32, Int32
from support import backends
from support.moe_problems import Layer, Problem, random_layer
from support.mutants import Mutant, Source, at, drop, instead, is_noticed, operand, outcome

from cute_nvfp4 import simulating
from cute_nvfp4.kernels.gemm.packed import decode
from cute_nvfp4.kernels.gemm.packed.grouped_stream import GroupPlace, StreamGroups
from cute_nvfp4.kernels.gemm.routed_config import RoutedConfig
from cute_nvfp4.kernels.gemm.sm90.grouped_config import GroupedWgmmaConfig, can_implement_groups
from cute_nvfp4.kernels.moe import few
from cute_nvfp4.kernels.moe.few import SlotIds
from cute_nvfp4.ops.moe.maps import Maps, routing_maps
from cute_nvfp4.ops.prepared_weight.rows import ROUTED
from cute_nvfp4.planning import packed_groups
from cute_nvfp4.sim import adversarial

pytestmark = pytest.mark.kernels
ARCHS = ("sm_90a", "sm_100a", "sm_120a")
GPT_OSS = Layer(
    9, 4, 6, 96, 160, "mxfp4", "clamped_swiglu", biases=True, interleaved=True, elsewhere=2, ids=torch.int32
)
QWEN3 = Layer(17, 3, 8, 128, 80, listed=True)
NEMOTRON = Layer(5, 2, 3, 112, 176, activation="relu2", routing="same", dtype=torch.float16)
FEW = dataclasses.replace(GPT_OSS, tokens=8, experts=40)
"""32 slots, which the products sort themselves."""
FEW_FP8 = dataclasses.replace(FEW, fp8=True, tokens=1)
NAMED = {"gpt-oss": GPT_OSS, "Qwen3": QWEN3, "Nemotron": NEMOTRON, "few": FEW}
SCHEDULED = NAMED | {"few for FP8": FEW_FP8}
FP8 = dataclasses.replace(GPT_OSS, fp8=True)


def problem_for(layer: Layer, arch: str) -> Problem:
    """The layer as an architecture can run it: on sm_100a x is quantized, and K is a multiple of 32."""
    if arch == "sm_100a":
        hidden, inner = (32 * -(-x // 32) for x in (layer.hidden, layer.inner))
        layer = dataclasses.replace(layer, quantized=True, hidden=hidden, inner=inner)
    return Problem(layer)


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ARCHS, indirect=True)
@pytest.mark.parametrize("name", NAMED)
def test_models(name: str, arch: str, poisoned: None) -> None:
    problem = problem_for(NAMED[name], arch)
    out = problem.run(backend=backends.backend())
    assert problem.right(out)
    assert torch.equal(problem.run(backend=backends.backend()), out)


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"], indirect=True)
@pytest.mark.parametrize("name", ["gpt-oss", "Nemotron"])
def test_sums_in_any_order(name: str, arch: str, poisoned: None) -> None:
    """Rows are added to those of their tokens, which are zeroed before: three launches."""
    problem = Problem(NAMED[name])
    out = problem.run(backend=backends.backend(), deterministic=False)
    assert problem.right(out, problem.layer.top)
    assert not problem.right(out + problem.run(backend=backends.backend()) / 16, problem.layer.top)


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"], indirect=True)
@pytest.mark.parametrize("deterministic", [True, False])
def test_shared_experts(deterministic: bool, arch: str, poisoned: None) -> None:
    """Their result is one more summand: of tokens that chose nobody here the only one."""
    problem = problem_for(dataclasses.replace(GPT_OSS, tokens=4), arch)
    problem.ids[1] = -1
    shared = torch.randn_like(problem.x) * 8
    out = problem.run(backend=backends.backend(), shared=shared, deterministic=deterministic)
    assert torch.equal(out[1], shared[1])
    rest = (out.double() - shared.double()).to(problem.x.dtype)
    want = problem.run(backend="reference")
    assert (rest.double() - want.double()).norm() < 0.03 * want.double().norm()


@pytest.mark.parametrize("arch", ["sm_90a"], indirect=True)
def test_shared_expert_in_the_same_launches(arch: str, poisoned: None) -> None:
    """It is one more expert, which every token chooses with weight 1."""
    problem = Problem(Layer(5, 3, 5, 96, 80))
    problem.ids[:, -1], problem.topk_weights[:, -1] = 4, 1.0
    out = problem.run(backend=backends.backend())
    assert problem.right(out)
    problem.topk_weights[:, -1] = 0.0
    assert not problem.right(out)


@pytest.mark.parametrize("arch", ["sm_90a"], indirect=True)
def test_rows_in_fp8(arch: str, poisoned: None) -> None:
    """gpt-oss's, W4A8: six launches; wrong if the scale of a row is another's."""
    problem = Problem(FP8)
    out = problem.run(backend=backends.backend())
    assert problem.right(out)
    problem.x[0] *= 64
    assert not problem.right(out)


@pytest.mark.sim_only("counts launches")
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_few_rows_for_fp8_stay_in_16_bits(format: str, poisoned: None) -> None:
    """The launches of experts for 16 bits, and their exactness; the last product of which rows would be quantized."""
    problem = Problem(dataclasses.replace(FEW_FP8, format=format))
    with simulating("sm_90a") as runs:
        out = problem.run()
    assert [x.name for x in runs] == ["stream_groups", "stream_groups", "moe_combine"]
    assert problem.right(out) and problem.right(problem.run(backend="reference"))
    problem.rounds_rows = True
    assert not torch.equal(*(x.exact()[0] for x in (problem, Problem(problem.layer))))
    more = Problem(dataclasses.replace(problem.layer, tokens=60))
    with simulating("sm_90a") as runs:
        assert more.right(more.run())
    # each product, after the launch that quantizes its rows
    products = ["moe_product"] * 2 + ["grouped_wgmma"] * 2
    assert [x.name for x in runs] == ["moe_maps", *products, "moe_combine"]


@pytest.mark.parametrize("arch", ["sm_90a"], indirect=True)
@pytest.mark.parametrize(
    "name, widths",
    [*((name, (24, 72, 144)) for name in ("gpt-oss", "FP8", "Nemotron")), ("gpt-oss", (24,)), ("FP8", (40,))],
)
def test_widths(name: str, widths: tuple[int, ...], arch: str, poisoned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of several widths, and of one that is no multiple of 16; both ask for biases and factors before their
    products."""
    monkeypatch.setattr(packed_groups, "FEW_ROWS", 0.0)
    monkeypatch.setattr(packed_groups, "WIDTHS", (widths,))
    monkeypatch.setattr(packed_groups, "EXPERT_WIDTHS", ())
    layer = FP8 if name == "FP8" else NAMED[name]
    problem = Problem(dataclasses.replace(layer, tokens=83, top=2, experts=3))
    assert problem.right(problem.run(backend=backends.backend()))


@pytest.mark.sweep(60)
@pytest.mark.parametrize("seed, arch", [(i, ARCHS[i % 3]) for i in range(300)], indirect=["arch"])
def test_random_layers(seed: int, arch: str, poisoned: None) -> None:
    problem = Problem(random_layer(seed, arch))
    assert problem.right(problem.run(backend=backends.backend()))


@pytest.mark.sweep(8)
@pytest.mark.parametrize("seed", range(24))
def test_reference(seed: int) -> None:
    problem = Problem(random_layer(seed, ARCHS[seed % 2]))
    assert problem.right(problem.run(backend="reference"))


def test_the_check_sees_a_wrong_result() -> None:
    """A choice too many, another weight, a row in another's place."""
    for layer in (QWEN3, dataclasses.replace(GPT_OSS, quantized=True)):
        problem = Problem(layer)
        out = problem.run(backend="reference")
        assert problem.right(out)
        assert not problem.right(out.roll(1, 0))
        wrong = problem.topk_weights.clone()
        wrong[0, 0] += 0.25
        problem.topk_weights, kept = wrong, problem.topk_weights
        problem.ids[0, 0] = problem.offset
        assert not problem.right(out)
        problem.topk_weights = kept


@pytest.mark.parametrize("arch", ["sm_90a"], indirect=True)
@pytest.mark.parametrize("tokens, top, experts", [(1, 1, 1), (1, 10, 300), (33, 1, 5), (130, 5, 3)])
def test_maps(tokens: int, top: int, experts: int, arch: str, poisoned: None) -> None:
    """Those of a stable sort, with ids out of range, at every count of slots of a warp."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-2, experts + 2, (tokens, top), generator=generator, dtype=torch.int32).to(backends.device())
    for offset in (0, 1):
        whole = torch.full_like(routing_maps(ids, experts, offset, backend="reference"), 7_654_321)
        maps = Maps.of(routing_maps(ids, experts, offset, whole, backends.backend()), experts)
        local = [i - offset for i in ids.flatten().tolist()]
        order = sorted((e, slot) for slot, e in enumerate(local) if 0 <= e < experts)
        last = len(order)
        assert maps.offsets.tolist() == [sum(e < n for e, _ in order) for n in range(experts + 1)]
        assert maps.experts[:last].tolist() == [e for e, _ in order]
        assert maps.slots[:last].tolist() == [slot for _, slot in order]
        places = {slot: row for row, (_, slot) in enumerate(order)}
        assert maps.rows.tolist() == [places.get(slot, -1) for slot in range(len(local))]
        assert (maps.slots[last:] == 7_654_321).all()


@functools.cache
def scheduled(name: str) -> tuple[Problem, torch.Tensor]:
    """A problem, and its result by the default schedule."""
    problem = Problem(SCHEDULED[name])
    with simulating("sm_90a"):
        return problem, problem.run()


@pytest.mark.sim_only("runs schedules")
@pytest.mark.sweep(10, draws=("index",))
@pytest.mark.parametrize("index", range(20))
@pytest.mark.parametrize("name", ["gpt-oss", "Nemotron", "few", "few for FP8"])
def test_any_schedule_gives_the_same_bits(name: str, index: int) -> None:
    problem, out = scheduled(name)
    with simulating("sm_90a", schedule=adversarial(20)[index], checks=True):
        assert problem.right(out) and torch.equal(problem.run(), out)


@pytest.mark.sim_only("counts launches")
def test_launches() -> None:
    """Their number and their grids depend on shapes alone."""
    grids = []
    for layer in (QWEN3, dataclasses.replace(QWEN3, routing="crowded", elsewhere=0)):
        problem = Problem(layer)
        with simulating("sm_90a") as runs:
            problem.run()
        assert [x.name for x in runs] == ["moe_maps", "stream_groups", "stream_groups", "moe_combine"]
        grids.append([x.launch.grid for x in runs])
    assert grids[0] == grids[1]
    problem = Problem(dataclasses.replace(QWEN3, tokens=10))
    with simulating("sm_90a") as runs:
        problem.run()
    assert [x.name for x in runs] == ["stream_groups", "stream_groups", "moe_combine"]


@pytest.mark.sim_only("reads PTX")
def test_gathering_has_no_fence() -> None:
    """The loop that starts ``cp.async`` has no fence between proxies, which other copies need."""
    config = GroupedWgmmaConfig(tile_n=64, routed=RoutedConfig(gathered=True), gate="silu")
    ptx = ROUTED.compile(config).ptx
    begin = ptx.rindex("mbarrier.try_wait", 0, ptx.index("cp.async.cg"))
    assert "fence.proxy" not in ptx[begin : ptx.index("cp.async.mbarrier")]


def test_wide_gathered_tiles_are_refused() -> None:
    """In 16 bits ptxas would let no two of their products run at the same time."""
    assert "at most 144" in can_implement_groups(GroupedWgmmaConfig(tile_n=256, routed=RoutedConfig(gathered=True)))
    assert (
        can_implement_groups(GroupedWgmmaConfig(tile_n=256, routed=RoutedConfig(gathered=True), dtype="float8_e4m3fn"))
        == ""
    )


@pytest.mark.parametrize("arch", ["sm_90a"], indirect=True)
def test_a_tie_of_rows_in_fp8(arch: str, poisoned: None) -> None:
    """One of 300 layers, of which a GPU and float64 round an element to other codes, in a row that nearly cancels."""
    problem = Problem(random_layer(200, arch))
    assert problem.right(problem.run(backend=backends.backend()))


ALWAYS, ZERO = "setp.eq.s32 {0}, 0, 0;", "mov.b32 {0}, 0;"
ARRIVED = instead("mbarrier.arrive.b64 _, {0};")
MUTANTS = (
    Mutant("counts not waited for", at("bar.sync", drop()), "moe_maps", noticed="Race"),
    Mutant("one place for a warp's rows", at("popc", instead(ZERO), slice(8, 9)), "moe_maps", noticed=""),
    Mutant("rows without K's second half", at("cp.async.cg", drop(), slice(1, None)), "moe_product", noticed=""),
    Mutant("copies that nobody waits for", at("cp.async.mbarrier", ARRIVED), "moe_product", noticed="Race"),
    Mutant("each row another's", at("shfl.sync.idx", operand(2, "0"), slice(-1, None)), "moe_product"),
    Mutant("router weights not waited for", at("bar.sync", drop(), slice(-1, None)), "moe_product", noticed="Race"),
    Mutant("a limit that is none", at("min.NaN", instead("mov.f32 {0}, {1};")), "moe_product"),
    Mutant("choices added that are elsewhere", at("setp.ne.b32", instead(ALWAYS)), "moe_combine", noticed=""),
)


FIRST = slice(0, 1)
IN_ORDER = Source(SlotIds, "place", lambda ids, expert, lane: lane)
OF_FEW = (
    Mutant("rows in the order of slots", IN_ORDER, "stream_groups", noticed=""),
    Mutant("experts that are elsewhere before all", Source(few, "NOBODY", 0), "stream_groups", noticed=""),
    Mutant("the table not waited for", at("bar.sync", drop(), FIRST), "stream_groups", noticed="Race"),
    Mutant("sums in the order of slots", IN_ORDER, "moe_combine", noticed=""),
)


def _ones(groups: StreamGroups, place: GroupPlace, quad_row: Int32) -> list[tuple[Float32, ...]]:
    return [(Float32(1.0),) * 4] * groups.config.products


OF_FP8 = (
    Mutant("signs of another row", Source(decode, "SIGN_SHIFT", 0), "stream_groups", noticed=""),
    Mutant("rows without their factors", Source(StreamGroups, "ask_row_factors", _ones), "stream_groups", noticed=""),
)


@pytest.mark.sim_only("changes PTX")
@pytest.mark.sweep(3)
@pytest.mark.parametrize("mutant", [*MUTANTS, *OF_FEW, *OF_FP8], ids=str)
def test_mutant_is_noticed(mutant: Mutant) -> None:
    layer = FEW_FP8 if mutant in OF_FP8 else FEW if mutant in OF_FEW else dataclasses.replace(GPT_OSS, tokens=30)
    problem = Problem(layer)
    # where the limits are met
    problem.x *= 8
    assert outcome(None, lambda: problem.right(problem.run()), "sm_90a") == ""
    assert is_noticed(outcome(mutant.change, lambda: problem.right(problem.run()), "sm_90a", mutant.case), mutant)


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ["sm_100a"], indirect=True)
@pytest.mark.parametrize("name", NAMED)
def test_rows_in_16_bits(name: str, arch: str, poisoned: None) -> None:
    """Where tensor cores multiply 4-bit rows, rows of 16 bits stay so if the experts are prepared for them."""
    problem = Problem(NAMED[name])
    for deterministic, most in ((True, 0), (False, problem.layer.top)):
        assert problem.right(problem.run(backend=backends.backend(), deterministic=deterministic), most)
