"""The outcomes of ``run_libraries.py`` as the second half of benchmarks/records/public_programs.md."""

from __future__ import annotations

from typing import Any

from cutlass_table import installed, words
from library_programs import OUT_OF_SCOPE, PACKAGES

HEADINGS = {
    "quack_programs.py": ("quack", "quack-kernels"),
    "flash_attention_programs.py": ("FlashAttention-4", "flash-attn-4"),
    "flashinfer_programs.py": ("FlashInfer", "flashinfer-python"),
    "cudnn_programs.py": ("cudnn-frontend", "nvidia-cudnn-frontend"),
}
_INTRODUCTION = """
Kernels of public libraries, called as their users call them: a driver of ours makes inputs, calls the library, which
compiles and launches its kernels, and compares the result with torch. Each program is one function of a driver in
`tests/public/libraries` with its arguments; it passes when its comparison holds and the simulator's checks, which are
on, find no hazard. A stop at a hazard that is argued to be true, with the kernel, its line and the evidence, is told in
[findings](findings.md).

Left out, and not counted: {left_out}. The norms of cudnn-frontend import `cutlass.primitives`,
which nvidia-cutlass-dsl 4.8.1 has under `cutlass.experimental`; the driver gives them that name. Seconds are of a whole
process, compilation included, on two cores with other work on them.

`python tests/public/run_libraries.py` makes this half of the page, from packages that `pip install` brings.

"""


def versions() -> dict[str, str]:
    return {name: installed(name) for name in (*PACKAGES, "nvidia-cutlass-dsl", "torch", "numpy", "cute-nvfp4")}


def argued(outcome: dict[str, Any]) -> bool:
    """Stopped at a hazard that benchmarks/records/findings.md argues to be true."""
    return outcome["outcome"] == "hazard" and outcome["expect"].startswith("true: ")


def internal(outcome: dict[str, Any]) -> bool:
    """Ended in an error of the simulator itself."""
    return outcome["status"] == 70


def markdown(outcomes: list[dict[str, Any]], about: dict[str, str]) -> str:
    passed = sum(o["outcome"] == "passed" for o in outcomes)
    text = _INTRODUCTION.format(left_out=OUT_OF_SCOPE)
    text += "Versions: " + ", ".join(f"{name} {found}" for name, found in about.items()) + ".\n\n"
    text += (
        f"- programs run: {len(outcomes)}\n- pass: {passed}\n- stop at a true hazard: {sum(map(argued, outcomes))}\n"
    )
    text += f"- do not pass for another reason: {len(outcomes) - passed - sum(map(argued, outcomes))}\n"
    for driver, (heading, package) in HEADINGS.items():
        group = [o for o in outcomes if o["program"] == driver]
        good = sum(o["outcome"] == "passed" for o in group)
        text += f"\n## {heading}\n\n{package} {about.get(package, '')}: {good} of {len(group)} pass.\n\n"
        text += "| program | arguments | seconds | outcome |\n|---|---|---:|---|\n"
        text += "".join(map(_row, group))
    return text


def _row(outcome: dict[str, Any]) -> str:
    name, _, arguments = outcome["arguments"].partition(" ")
    if outcome["outcome"] == "passed":
        told = "passes"
    elif argued(outcome):
        told = f"stops at a true hazard: {outcome['expect'].removeprefix('true: ')} ([findings](findings.md))"
    else:
        told = words(outcome | {"reason": outcome["reason"].partition("\n")[0]})
    arch = "" if outcome["arch"] == "sm_100a" else f" ({outcome['arch']})"
    shown = f"`{arguments}`" if arguments else ""
    return f"| {name}{arch} | {shown} | {outcome['seconds']:.0f} | {told} |\n"
