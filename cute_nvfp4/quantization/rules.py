"""The rules that choose a block's scale, as data: what each divides by, what it compares, and where it comes from.

docs/explanation/quantization.md has every rule's formula. The names are those of the literature; ``static_6`` is
fouroversix's name for ``max``, kept for its users.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import FORMATS, Format

# the largest block's scale if an NVFP4 tensor's global scale is computed: 448, E4M3's largest value …
_TOP = 448.0
# … or 256, for which the candidate that maps to 4, whose scale is 1.5 times larger, still fits
_TOP_FOUR_SIX = 256.0
_SMALLEST_NORMAL_E4M3 = 2.0**-6


@dataclass(frozen=True)
class Rule:
    """How the scale of a block follows from its elements.

    name: the user's name for it.
    scale: the type of scale it is for, "e4m3" or "ue8m0".
    max_code: the element that the block's largest magnitude is divided by; None: the format's largest.
    top_scale: E4M3 only: the scale of the block with the tensor's largest magnitude if the global scale is computed:
        global scale = amax / (max_code · top_scale).
    min_scale: E4M3 only: smaller scales are raised to it.
    exponent: UE8M0 only: how the exponent is rounded, "floor", "ceil", "even" or "rceil".
    choice: "": the formula alone decides; "mse", "mae" or "abs_max": the better of two candidates; "optimal" or
        "hessian": the best of all scales.
    """

    name: str
    scale: str
    max_code: float | None = None
    top_scale: float = _TOP
    min_scale: float = 0.0
    exponent: str = "rceil"
    choice: str = ""

    @property
    def full_scale(self) -> float:
        """``max_code`` · ``top_scale`` of an E4M3 rule: amax / global scale."""
        return (6.0 if self.max_code is None else self.max_code) * self.top_scale


_RULES = (
    Rule("max", "e4m3"),
    Rule("max_normal", "e4m3", min_scale=_SMALLEST_NORMAL_E4M3),
    Rule("static_4", "e4m3", max_code=4.0),
    Rule("four_six_mse", "e4m3", top_scale=_TOP_FOUR_SIX, choice="mse"),
    Rule("four_six_mae", "e4m3", top_scale=_TOP_FOUR_SIX, choice="mae"),
    Rule("four_six_abs_max", "e4m3", top_scale=_TOP_FOUR_SIX, choice="abs_max"),
    Rule("optimal", "e4m3", top_scale=_TOP_FOUR_SIX, choice="optimal"),
    Rule("hessian", "e4m3", top_scale=_TOP_FOUR_SIX, choice="hessian"),
    Rule("max", "ue8m0"),
    Rule("rceil", "ue8m0"),
    Rule("floor", "ue8m0", exponent="floor"),
    Rule("ceil", "ue8m0", exponent="ceil"),
    Rule("even", "ue8m0", exponent="even"),
    Rule("static_4", "ue8m0", max_code=4.0),
    Rule("optimal", "ue8m0", exponent="floor", choice="optimal"),
    Rule("hessian", "ue8m0", exponent="floor", choice="hessian"),
)
_BY_NAME = {(rule.name, rule.scale): rule for rule in _RULES}
_ALIASES = {"static_6": "max"}
# rules for the codes 4 and 6, and searches that use E2M1's steps
_ONLY_E2M1 = ("static_4", "optimal", "hessian")

RULE_NAMES = tuple(dict.fromkeys(rule.name for rule in _RULES))

_FORMATS = {**FORMATS, "mxfp8_e4m3": FORMATS["mxfp8"]}
FORMAT_NAMES = ("nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2")


def resolve_format(format: str | Format) -> Format:
    """The format called ``format``, or ``format`` itself."""
    if isinstance(format, Format):
        return format
    if format not in _FORMATS:
        raise OperandError.of("format", got=repr(format), expected=f"one of {', '.join(FORMAT_NAMES)}")
    return _FORMATS[format]


def resolve_rule(name: str, format: Format) -> Rule:
    """The rule called ``name`` for the scales of ``format``."""
    rule = _BY_NAME.get((_ALIASES.get(name, name), format.scale))
    if rule is None or (format.element != "e2m1" and rule.name in _ONLY_E2M1):
        raise OperandError.of(
            f"rule for {format.name}", got=repr(name), expected=f"one of {', '.join(rules_of(format))}"
        )
    return rule


def rules_of(format: str | Format) -> tuple[str, ...]:
    """The names of the rules for ``format``, without aliases."""
    format = resolve_format(format)
    return tuple(
        rule.name
        for rule in _RULES
        if rule.scale == format.scale and (format.element == "e2m1" or rule.name not in _ONLY_E2M1)
    )
