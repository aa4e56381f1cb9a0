"""The fate of every qualifier that the simulator's instructions accept, and the table of docs/reference/qualifiers.md.

``accepted`` reads off the builders in ``cute_nvfp4/sim/isa`` which words they consume; ``FATES`` says of each, by
chapter, whether it is executed, checked, refused, or ignored on purpose, and why. ``python -m
tests.simulator.qualifiers`` writes the page.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cute_nvfp4.sim.isa
from cute_nvfp4.sim.frontend.model import TYPE_BITS
from cute_nvfp4.sim.isa import memory

ISA = Path(cute_nvfp4.sim.isa.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "qualifiers.md"
TAKES = ("take", "flag", "words", "type")
"""Methods of ``Mods`` that consume a word if it is one of their arguments."""

VARIABLES: dict[str, tuple[str, ...]] = {
    "*table": ("add", "min", "max", "inc", "dec", "and", "or", "xor"),
    "'u32' if reduction == 'popc' else 'pred'": ("u32", "pred"),
    "'sync_restrict::shared::cluster' if order == 'acquire' else 'sync_restrict::shared::cta'": (
        *("sync_restrict::shared::cluster", "sync_restrict::shared::cta"),
    ),
    "*(('m8n16', 'm16n16') if load else ('m16n8',))": ("m8n16", "m16n16", "m16n8"),
    "*(('x1', 'x2') if shape == 'm16n16' else ('x1', 'x2', 'x4'))": ("x1", "x2", "x4"),
    "*vectors": ("scale_vec::1X", "scale_vec::2X", "scale_vec::4X"),
    "form.scale": ("ue8m0", "ue4m3"),
    "*form.elements": ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2"),
    "*more": (),
    "*operators": (*memory._LOAD_OPERATORS, *memory._STORE_OPERATORS),
    "*(f'{b}::{u}' for b in buffers for u in _USES)": (
        *(f"collector::{b}::{u}" for b in ("a", "b0", "b1", "b2", "b3") for u in ("fill", "use", "lastuse", "discard")),
    ),
    "*(f'kind::{x}' for x in kinds)": (
        *(f"kind::{x}" for x in ("f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4", "mxf4nvf4")),
    ),
    "*_BLOCKS[kind]": ("block16", "block32", "scale_vec::1X", "scale_vec::2X", "scale_vec::4X"),
    "packing": ("pack::16b", "unpack::16b"),
    "'b64' if wide else 'b32'": ("b64", "b32"),
    "'b32' if mode == 'ballot' else 'pred'": ("b32", "pred"),
}
"""Arguments that are no constants of their module, and the words they stand for."""


def accepted() -> dict[str, set[str]]:
    """The words that builders consume, by chapter (a file of ``isa``).

    Raises:
        AssertionError: for an argument whose words are not known.
    """
    out: dict[str, set[str]] = {}
    for path in sorted(ISA.glob("*.py")):
        module = importlib.import_module(f"cute_nvfp4.sim.isa.{path.stem}")
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call):
                words = {word for argument in _arguments(call) for word in _words(argument, vars(module), path.stem)}
                if words:
                    out.setdefault(path.stem, set()).update(words)
    return out


def _arguments(call: ast.Call) -> list[ast.expr]:
    """The words' places in a call that consumes some, of ``Mods`` or of ``pick``."""
    f = call.func
    if isinstance(f, ast.Attribute) and f.attr in TAKES and isinstance(f.value, ast.Name) and f.value.id == "m":
        return call.args
    picks = isinstance(f, ast.Name) and f.id in ("pick", "_shared") and ast.unparse(call.args[0]) == "m"
    return call.args[1:] if picks else []


def _words(argument: ast.expr, names: dict, chapter: str) -> tuple[str, ...]:
    text = ast.unparse(argument)
    if text in VARIABLES:
        return VARIABLES[text]
    starred = isinstance(argument, ast.Starred)
    try:
        value = eval(compile(ast.Expression(argument.value if starred else argument), chapter, "eval"), dict(names))
    except NameError:
        raise AssertionError(f"isa/{chapter}.py consumes {text}: say in VARIABLES which words that may be") from None
    return tuple(value) if starred else (value,)


EXECUTED, CHECKED, IGNORED, REFUSED = "executed", "checked", "ignored", "refused"


@dataclass(frozen=True)
class Fate:
    """What becomes of words (a pattern of whole words) in some chapters, "" for all, and what that is or why."""

    chapters: str
    words: str
    how: str
    what: str

    def is_of(self, chapter: str, word: str) -> bool:
        """Whether the row is the word's."""
        return chapter in (self.chapters.split() or [chapter]) and re.fullmatch(self.words, word) is not None


_TYPES = "|".join(sorted(TYPE_BITS, key=len, reverse=True))
_SCOPES = "cta|cluster|gpu|sys"
FATES = (
    Fate("", rf"{_TYPES}|e2m1|e2m3|e3m2|e4m3|e5m2|ue4m3|ue8m0|s8|u8|s16x2|u16x2", EXECUTED, "the type of operands"),
    Fate("", r"v[248]", EXECUTED, "the number of elements"),
    Fate("", r"m\d+n\d+(k\d+)?|x\d+|\d+x\d+b(x2)?|b\w+_p\d+|b8x16|b1024", EXECUTED, "a shape, or how bytes are packed"),
    Fate("mbarrier", "cta|cluster", CHECKED, "arrivals at other CTAs and fences order only threads of the scope"),
    Fate(
        "memory atomic tensormap fence",
        f"{_SCOPES}|gl",
        CHECKED,
        "an edge, and strong accesses, need scopes on both sides",
    ),
    Fate("bulk", "cluster", IGNORED, "the only scope that red.async has"),
    Fate("control", "cluster|cta", EXECUTED, "which barrier; `.cta` says what `bar` is"),
    Fate(
        "memory atomic",
        "relaxed|acquire|release|acq_rel|sc|volatile|mmio|weak",
        CHECKED,
        "execution is sequentially consistent; releases, acquires and strong accesses are edges and excuses",
    ),
    Fate(
        "mbarrier cluster fence tensormap",
        "release|acquire|relaxed|acq_rel|sc",
        CHECKED,
        "what an arrival, a wait or a fence orders",
    ),
    Fate("bulk", "weak|relaxed", IGNORED, "st.async and red.async have no other order"),
    Fate(
        "fence",
        "mbarrier_init|proxy|async|async::generic|tensormap::generic|sync_restrict::.*",
        CHECKED,
        "which proxy, or which half, a fence joins",
    ),
    Fate("fence", "shared::cta|shared::cluster|global", CHECKED, "the space for which a proxy fence counts"),
    Fate("fence", "alias", IGNORED, "no two virtual addresses are one place here"),
    Fate("tensormap", "tensormap::generic", CHECKED, "who uses the map needs the acquire"),
    Fate("memory", "nc", CHECKED, "the launch must not write what is loaded so"),
    Fate(
        "memory copy",
        "ca|cg|cs|lu|cv|wb|wt|unified|L[12]::.*|L1|L2|fractional|cvt|range|tensormap",
        IGNORED,
        "caches: where bytes are kept changes no value; counted, and the model of L2 and the clock read some",
    ),
    Fate(
        "atomic bulk bulk_tensor",
        "L2|L2::cache_hint|prefetch",
        IGNORED,
        "caches: where bytes are kept changes no value",
    ),
    Fate(
        "",
        "shared|shared::cta|shared::cluster|global|local|const|param|param::entry",
        EXECUTED,
        "the state space: bounds, and whose shared memory",
    ),
    Fate("tcgen05", "alloc|dealloc|relinquish_alloc_permit|mma|cp|ld|st|shift|commit", EXECUTED, "the operation"),
    Fate(
        "tcgen05",
        "wait::.*|fence::.*",
        CHECKED,
        "when loads and stores of tensor memory are over; with `--strict`, the fences",
    ),
    Fate(
        "control copy bulk bulk_tensor clc memory atomic",
        "async|bulk|reduce|read|commit_group|wait_group|wait_all|bulk_group|mbarrier|arrive|noinc|tensor|to",
        EXECUTED,
        "which operation",
    ),
    Fate(
        "bulk bulk_tensor clc",
        "mbarrier::complete_tx::bytes|multicast::cluster.*|cp_mask|cta_group::[12]",
        EXECUTED,
        "what is signalled, and which CTAs and bytes are written",
    ),
    Fate("bulk_tensor", r"[1-5]d|tile.*|im2col.*", EXECUTED, "the box"),
    Fate("", "add|min|max|inc|dec|and|or|xor|exch|cas|popc", EXECUTED, "the operation"),
    Fate("atomic bulk", "noftz", EXECUTED, "subnormals are kept"),
    Fate(
        "mbarrier",
        "init|inval|arrive|arrive_drop|complete_tx|expect_tx|pending_count|test_wait|try_wait|noComplete|parity",
        EXECUTED,
        "the operation",
    ),
    Fate("control", "sync|arrive|red|warp|inc|dec|idx", EXECUTED, "the operation"),
    Fate("cluster", "arrive|wait", EXECUTED, "the operation"),
    Fate(
        "control",
        "launch_dependents",
        IGNORED,
        "launches run one after another; without the wait nothing of the launch before counts as seen",
    ),
    Fate("control", "wait", CHECKED, "what the launch before has touched"),
    Fate(
        "control cluster tcgen05 tcgen05_move matrix tensormap wgmma",
        "aligned",
        EXECUTED,
        "all lanes of the warp must come",
    ),
    Fate(
        "control tcgen05 tcgen05_move matrix tensormap warp wgmma",
        "sync",
        EXECUTED,
        "lanes wait for those that take part",
    ),
    Fate("control", "uni", EXECUTED, "lanes that part are an error"),
    Fate("calls", "uni", IGNORED, "only printf and what it needs are called, which every lane returns from"),
    Fate("warp", "up|down|bfly|idx|all|any|uni|ballot|abs|NaN", EXECUTED, "the operation"),
    Fate("bits", "clamp|wrap|l|r|shiftamt|b4e|f4e|ecl|ecr|rc8|rc16", EXECUTED, "the operation"),
    Fate("compare", "eq|ne|l[teos]u?|g[te]u?|equ|neu|hi|hs|nan|num|ftz", EXECUTED, "the comparison"),
    Fate(
        "convert",
        "r[nmpz]i?|rna|rs|ftz|sat|satfinite|relu",
        EXECUTED,
        "rounding and range; `.rs` is refused afterwards",
    ),
    Fate(
        "floats",
        "r[nmpz]|approx|full|ftz|sat|relu|NaN|xorsign|abs|finite|infinite|normal|notanumber|number|subnormal",
        EXECUTED,
        "rounding and range; `.approx` rounds correctly, where the ISA bounds the error",
    ),
    Fate("integer", "cc|sat|hi|lo|wide|relu", EXECUTED, "which half, carry, range"),
    Fate(
        "matrix matrix_scaled",
        "row|col|trans|satfinite|kind::.*|block_scale|scale_vec::.*",
        EXECUTED,
        "layout, kind and scales",
    ),
    Fate("matrix wgmma tcgen05_mma", "sp|sp::ordered_metadata", REFUSED, "sparse products are not modelled"),
    Fate(
        "wgmma",
        "mma_async|fence|commit_group|wait_group|satfinite",
        EXECUTED,
        "the operation; the checks follow its registers",
    ),
    Fate("clc", "try_cancel|query_cancel|get_first_ctaid.*|is_canceled", EXECUTED, "the operation"),
    Fate(
        "tcgen05 tcgen05_mma",
        "cta_group::[12]|multicast::cluster|mbarrier::arrive::one|warpx.*|down",
        EXECUTED,
        "which CTAs, and what is signalled",
    ),
    Fate("tcgen05_mma", "ws|ashift|kind::.*|block\\d+|block_scale|scale_vec::.*", EXECUTED, "the product"),
    Fate(
        "tcgen05_mma",
        "collector::.*",
        IGNORED,
        "which operand the tensor core keeps; what is kept is what its descriptor names, "
        "unless the program changes the bytes between `fill` and `use`, which is not looked "
        "for",
    ),
    Fate("tcgen05_move", "pack::16b|unpack::16b|red|min|max|NaN|abs", EXECUTED, "the operation"),
    Fate(
        "tensormap",
        "replace|tile|cp_fenceproxy|box_dim|element_stride|elemtype|fill_mode|global_address|"
        "global_dim|global_stride|interleave_layout|rank|swizzle_atomicity|swizzle_mode",
        EXECUTED,
        "the field; `interleave_layout` must say none",
    ),
)


def fate(chapter: str, word: str) -> Fate | None:
    """The first row of ``FATES`` that has the word."""
    return next((row for row in FATES if row.is_of(chapter, word)), None)


def page() -> str:
    """docs/reference/qualifiers.md."""
    rows: dict[Fate, dict[str, list[str]]] = {row: {} for row in FATES}
    for chapter, word in _sorted():
        rows[fate(chapter, word)].setdefault(word, []).append(chapter)
    lines = [_HEAD]
    for row, words in rows.items():
        chapters = sorted({chapter for named in words.values() for chapter in named})
        shown = " ".join(f"`.{word}`" for word in words)
        lines.append(f"| {', '.join(chapters)} | {shown} | {row.how} | {row.what} |")
    return "\n".join(lines) + "\n"


def _sorted() -> Iterator[tuple[str, str]]:
    for chapter, words in sorted(accepted().items()):
        for word in sorted(words - {""}):
            yield chapter, word


_HEAD = """# Qualifiers

This page lists every word behind a `.` that the simulator accepts in an instruction, by the files of
`cute_nvfp4/sim/isa` that accept it, and what becomes of it: it is *executed* (it decides values, or who may go on),
*checked* (it changes no value; the checks of [checks.md](checks.md) follow it), *ignored* on purpose, or *refused* by
name. A word that is not here is an `UnsupportedInstruction`. `python -m tests.simulator.qualifiers` writes this page
from the builders; a test fails where a word has no row, or a row no word.

| chapters | words | what becomes of it | what it says, or why |
|---|---|---|---|"""

if __name__ == "__main__":
    PAGE.write_text(page())
