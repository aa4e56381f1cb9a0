"""Planned launches and calls: what was decided once, for tensors of one kind.

An operation fills its kernel's record of arguments by name: where the record has an address stands what lies there,
"a.data" or "out". From the names follow what a call writes into its parameters, what the simulator may touch, what
must not overlap, and what ``prepare`` and ``export`` may vary. Nobody counts places.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from ..operand import span_bytes
from ..runtime.kernel import Kernel
from ..runtime.launch import SimLauncher, Tensors
from ..runtime.overlap import OverlapCheck
from ..target import Target

WRITTEN = ("out", "status", "scratch", "data", "scale", "computed", "values", "residual_out", "sums")
"""Fields of a call that a kernel writes."""


def allocator(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes tensors like a dense one that nobody uses: its memory is given back.

    ``torch.empty_like`` has only one argument to read, and so takes half the time of ``torch.empty``.
    """
    storage = like.untyped_storage()
    # memory of a simulated GPU, or of another allocator, may be for keeps
    if storage.resizable():
        storage.resize_(0)
    return functools.partial(torch.empty_like, like)


class PlannedLaunch:
    """One launch of ``kernel``, planned for a call of ``fields`` like ``example``.

    arguments: the kernel's record, of plain numbers; a varying one is a name: "out" is the address of a tensor of the
    call, "a.data" that of a part of a field, "b1.data + 64" lies 64 bytes further; the name of a number is that number.
    What is no name is the same in every call. read_only: parts of results that are only read.
    """

    def __init__(
        self,
        kernel: Kernel,
        config: Any,
        target: Target,
        device: torch.device,
        arguments: Any,
        fields: Sequence[str],
        example: Sequence[Any],
        read_only: Sequence[str] = (),
    ) -> None:
        self.fields = tuple(fields)
        signature = kernel.signature(config)
        flat = signature.values(arguments, 0)
        sources = [flat[i] for i in signature.varying]
        self.launch = kernel.launcher(config, target, device, arguments, self.touched)
        tensors: dict[str, torch.Tensor] = {}
        terms, self._places = [], {}
        for place, source in enumerate(sources):
            path, _, added = source.partition(" + ") if isinstance(source, str) else ("", "", "")
            found = self._at(path, example) if path else source
            if found is None:
                raise ValueError(f"argument {path} of {kernel.name}: the call has none, expected a tensor or a number")
            if path and isinstance(found, torch.Tensor):
                tensors[path], self._places[place] = found, path
                terms.append(f"{path}.data_ptr()" + (f" + {added}" if int(added or 0) else ""))
            else:
                terms.append(path or repr(source))
        self.terms = ", ".join(terms)
        self.values: Callable[..., tuple] = eval(f"lambda {', '.join(fields)}: ({self.terms},)")
        # a plan outlives its example by far: it keeps the paths, and no memory
        self._written = {x for x in tensors if x.split(".")[0] in WRITTEN and x not in read_only}
        self.apart = self._apart(tensors)

    def _at(self, path: str, given: Sequence[Any]) -> Any:
        field, _, part = path.partition(".")
        found = given[self.fields.index(field)]
        return attrgetter(part)(found) if part else found

    def _apart(self, tensors: Mapping[str, torch.Tensor]) -> OverlapCheck:
        """What outputs must be apart from: everything that is read elsewhere, and each other's parts."""
        sizes = {place: span_bytes(tensors[path]) for place, path in self._places.items()}
        written = [i for i, path in self._places.items() if path in self._written]
        outs = [(i, sizes[i]) for i in written if self._places[i].split(".")[0] in ("out", "residual_out")]
        in_place = {_where(tensors[path]) for path in self._written}
        elsewhere = {path for path, x in tensors.items() if _where(x) not in in_place}
        return OverlapCheck({i: size for i, size in sizes.items() if self._places[i] in elsewhere}, outs)

    def touched(self, *given: Any) -> Tensors:
        """Every tensor that the launch may touch, by name. given: the fields of a call."""
        found = {path: self._at(path, given).detach() for path in self._places.values()}
        # what is read where it is written counts once
        in_place = {_where(found[path]) for path in self._written}
        return {
            path: (x, path in self._written)
            for path, x in found.items()
            if path in self._written or _where(x) not in in_place
        }

    @property
    def places(self) -> dict[str, int]:
        """Where each address is among the values; of one that is there more than once the first."""
        return {path: place for place, path in reversed(self._places.items())}

    def slots(self, fields: Sequence[str]) -> dict[str, list[tuple[str | None, int]]]:
        """The parts of each of ``fields`` (None: it is a tensor), and their places among the values."""
        found: dict[str, list] = {name: [] for name in fields}
        for place, path in self._places.items():
            field, _, part = path.partition(".")
            if field in found:
                found[field].append((part or None, place))
        return found


def _where(x: torch.Tensor) -> tuple[int, tuple[int, ...]] | None:
    """Where a tensor lies; None of one without memory."""
    return None if x.is_meta else (x.data_ptr(), x.stride())


_CALL = """\
def call({given}):
    _is_given = {any_out}
    if out is None:
        out = {new}
    {more}
    _values = ({terms},)
    if _is_given and _near(_values):
        _overlaps({given})
    _launch(_values{owners})
    return {result}
"""
"""A planned call, compiled: as fast as if it were written by hand, which is what a NamedTuple does for its methods."""


class PlannedCall:
    """A call of an operation, planned: completes what it is given, looks for overlap, and launches once.

    new: what is made where an argument is None, by name. outs: the arguments that are written. overlaps: raises what is
    to be said of one that is near an input. extra: makes one more field of the launch, of the arguments; whether it may
    be memory of earlier calls is its second argument. before: is called with the arguments first. new_of: makes an
    output that depends on them. result: what is returned, of the fields; wrap: makes one of them.

    run: makes the call; its ``owner`` is this object.
    """

    def __init__(
        self,
        launch: PlannedLaunch,
        new: Mapping[str, Callable[[], Any]],
        outs: Sequence[str],
        overlaps: Callable[..., None],
        extra: Callable[[tuple, bool], Any] | None = None,
        before: Callable[..., None] | None = None,
        new_of: Callable[..., Any] | None = None,
        result: str = "out",
        wrap: Callable[..., Any] | None = None,
    ) -> None:
        self.planned, self._new, self._new_of, self.extra = launch, new, new_of, extra
        fields = launch.fields if extra is None else launch.fields[:-1]
        given = ", ".join(fields)
        more = [f"if {name} is None: {name} = _new[{name!r}]()" for name in new if name != "out"]
        if extra is not None:
            more.append(f"{launch.fields[-1]} = _extra(({given},), True)")
        if before is not None:
            more.append(f"_before({given})")
        # on a GPU nothing but the values is asked for
        run = getattr(launch.launch, "of_values", None)
        scope = {"_new": new, "_new_of": new_of, "_make": new.get("out"), "_extra": extra, "_before": before}
        scope |= {"_overlaps": overlaps, "_near": launch.apart.near, "_launch": run or launch.launch, "_wrap": wrap}
        exec(
            _CALL.format(
                given=given,
                any_out=" or ".join(f"{x} is not None" for x in outs),
                new="_make()" if new_of is None else f"_new_of({given})",
                more="\n    ".join(more),
                terms=launch.terms,
                owners="" if run else f", ({', '.join(launch.fields)},)",
                result=result if wrap is None else f"_wrap({result})",
            ),
            scope,
        )
        self.run: Callable[..., Any] = scope["call"]
        self.run.owner = self
        self.launch = launch.launch

    def __call__(self, *given: Any) -> Any:
        """The result for the arguments, in order."""
        return self.run(*given)

    def preparation(self, given: tuple, vary: Sequence[str]) -> Preparation:
        """This call with ``given``, for ``prepare``. vary: fields that may be others in a later call."""
        launch, given = self.planned, list(given)
        new = dict(self._new)
        if self._new_of is not None:
            new["out"] = functools.partial(self._new_of, *given)
        for name, make in new.items():
            place = launch.fields.index(name)
            given[place] = make() if given[place] is None else given[place]
        frame = given if self.extra is None else [*given, self.extra(tuple(given), False)]
        named = dict(zip(launch.fields, frame))
        return Preparation(
            launch.launch,
            launch.values(*frame),
            {name: named[name] for name in vary},
            launch.slots(vary),
            launch.apart,
            lambda x: tuple(x.get(name, one) for name, one in named.items()),
        )


@dataclass
class Preparation:
    """One launch of an operation that was planned, for ``prepare`` and ``export``.

    values: of a call. operands: by name, "out" among them. slots: for each that may vary, its parts (None: it is a
    tensor) and their places among the values; of an operand that is a list, those of each element. apart: what is read,
    and what is written. owners: from operands to what the launcher takes.
    """

    launch: Callable[[tuple, tuple], None]
    values: tuple
    operands: dict[str, Any]
    slots: dict[str, Sequence]
    apart: OverlapCheck
    owners: Callable[[dict[str, Any]], tuple]

    def __post_init__(self) -> None:
        self.reads_owners = isinstance(self.launch, SimLauncher) or getattr(self.launch, "reads_owners", False)
