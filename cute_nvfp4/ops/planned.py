"""Planned launches and calls: what the first call of a kind decides, and later calls reuse.

An operation fills its kernel's record of arguments. In the place of an address it writes the name of the tensor there,
such as "a.data" or "out". From these names follow the parameters that a call sets, the memory that the simulator may
touch, the checks for overlap, and what ``prepare`` and ``export`` may vary. No code counts parameters by hand.
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
"""Fields of a call that a kernel may write."""


def allocator(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that makes tensors like ``like``, which is dense and which nobody else uses: its memory is freed.

    ``torch.empty_like`` reads one argument only, and takes half the time of ``torch.empty``.
    """
    storage = like.untyped_storage()
    # memory of a simulated GPU or of another allocator may not be resizable
    if storage.resizable():
        storage.resize_(0)
    return functools.partial(torch.empty_like, like)


class PlannedLaunch:
    """One launch of ``kernel``, planned for a call with the arguments ``fields``, of which ``example`` is one.

    arguments: the kernel's record of plain numbers, in which a string stands for a value that a call sets: "out" is the
    address of a tensor argument, "a.data" the address of a part of an argument, "b1.data + 64" lies 64 bytes further,
    and the name of a number is that number. Other values are the same in every call.
    read_only: parts of outputs that the kernel only reads.
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
        terms, self._paths = [], {}
        for index, source in enumerate(sources):
            path, _, added = source.partition(" + ") if isinstance(source, str) else ("", "", "")
            found = self._at(path, example) if path else source
            if found is None:
                raise ValueError(f"argument {path} of {kernel.name}: the call has none, expected a tensor or a number")
            if path and isinstance(found, torch.Tensor):
                tensors[path], self._paths[index] = found, path
                terms.append(f"{path}.data_ptr()" + (f" + {added}" if int(added or 0) else ""))
            else:
                terms.append(path or repr(source))
        self.terms = ", ".join(terms)
        self.values: Callable[..., tuple] = eval(f"lambda {', '.join(fields)}: ({self.terms},)")
        # a plan lives much longer than its example: keep paths, and no tensors
        self._written = {x for x in tensors if x.split(".")[0] in WRITTEN and x not in read_only}
        self.apart = self._apart(tensors)

    def _at(self, path: str, args: Sequence[Any]) -> Any:
        field, _, part = path.partition(".")
        found = args[self.fields.index(field)]
        return attrgetter(part)(found) if part else found

    def _apart(self, tensors: Mapping[str, torch.Tensor]) -> OverlapCheck:
        """The check that outputs overlap neither the inputs nor each other; in-place inputs are exempt."""
        sizes = {index: span_bytes(tensors[path]) for index, path in self._paths.items()}
        written = [i for i, path in self._paths.items() if path in self._written]
        outs = [(i, sizes[i]) for i in written if self._paths[i].split(".")[0] in ("out", "residual_out")]
        in_place = {_where(tensors[path]) for path in self._written}
        elsewhere = {path for path, x in tensors.items() if _where(x) not in in_place}
        return OverlapCheck({i: size for i, size in sizes.items() if self._paths[i] in elsewhere}, outs)

    def touched(self, *args: Any) -> Tensors:
        """Every tensor that the launch may touch, by name, and whether it is written. args: the fields of a call."""
        found = {path: self._at(path, args).detach() for path in self._paths.values()}
        # an input that is also the output counts once
        in_place = {_where(found[path]) for path in self._written}
        return {
            path: (x, path in self._written)
            for path, x in found.items()
            if path in self._written or _where(x) not in in_place
        }

    def slots(self, fields: Sequence[str]) -> dict[str, list[tuple[str | None, int]]]:
        """The parts of each of ``fields`` (None: the field is a tensor), with their positions among the values."""
        found: dict[str, list] = {name: [] for name in fields}
        for index, path in self._paths.items():
            field, _, part = path.partition(".")
            if field in found:
                found[field].append((part or None, index))
        return found


def _where(x: torch.Tensor) -> tuple[int, tuple[int, ...]] | None:
    """The address and strides of a tensor; None if it has no memory."""
    return None if x.is_meta else (x.data_ptr(), x.stride())


_CALL = """\
def call({args}):
    _has_out = {any_out}
    if out is None:
        out = {new}
    {more}
    _values = ({terms},)
    if _has_out and _near(_values):
        _overlaps({args})
    _launch(_values{owners})
    return {result}
"""
"""A planned call. It is compiled for its arguments, and so as fast as handwritten code."""


class PlannedCall:
    """A planned call of an operation: makes what is missing, checks for overlap, and launches once.

    launch: the planned launch. new: makers of arguments that are None, by name. outs: the arguments that are written.
    overlaps: raises the error for an output that may overlap an input. extra: makes one more field of the launch from
    the arguments; its second argument says whether it may reuse memory of earlier calls. before: runs first, with the
    arguments. new_of: makes an output that depends on the arguments. result: an expression of the fields for what the
    call returns. wrap: builds a record of that.

    ``run`` makes the call; ``run.owner`` is this object.
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
        args = ", ".join(fields)
        more = [f"if {name} is None: {name} = _new[{name!r}]()" for name in new if name != "out"]
        if extra is not None:
            more.append(f"{launch.fields[-1]} = _extra(({args},), True)")
        if before is not None:
            more.append(f"_before({args})")
        # a launcher for a GPU takes the values alone
        run = getattr(launch.launch, "of_values", None)
        scope = {"_new": new, "_new_of": new_of, "_make": new.get("out"), "_extra": extra, "_before": before}
        scope |= {"_overlaps": overlaps, "_near": launch.apart.near, "_launch": run or launch.launch, "_wrap": wrap}
        exec(
            _CALL.format(
                args=args,
                any_out=" or ".join(f"{x} is not None" for x in outs),
                new="_make()" if new_of is None else f"_new_of({args})",
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

    def __call__(self, *args: Any) -> Any:
        """The result for the arguments, in order."""
        return self.run(*args)

    def preparation(self, args: tuple, vary: Sequence[str]) -> Preparation:
        """This call with the arguments ``args``, for ``prepare``. vary: the fields that later calls may change."""
        launch, args = self.planned, list(args)
        new = dict(self._new)
        if self._new_of is not None:
            new["out"] = functools.partial(self._new_of, *args)
        for name, make in new.items():
            index = launch.fields.index(name)
            args[index] = make() if args[index] is None else args[index]
        frame = args if self.extra is None else [*args, self.extra(tuple(args), False)]
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
    """One planned launch of an operation, for ``prepare`` and ``export``.

    launch: the launcher. values: the values of the launch's parameters. operands: the operands by name, with "out".
    slots: for each operand that may vary, its parts (None: it is a tensor) with their positions among the values; for a
    list the parts of each element. apart: the check for overlap. owners: from operands to what the launcher takes.
    """

    launch: Callable[[tuple, tuple], None]
    values: tuple
    operands: dict[str, Any]
    slots: dict[str, Sequence]
    apart: OverlapCheck
    owners: Callable[[dict[str, Any]], tuple]

    def __post_init__(self) -> None:
        self.reads_owners = isinstance(self.launch, SimLauncher) or getattr(self.launch, "reads_owners", False)
