"""The operand of every kernel: block-scaled data with its scales, checked once, when it is built.

Checks read only what torch keeps on the host (dtype, device, shape, strides, address), so building an operand neither
copies nor waits for the device, and takes a few microseconds. Values are not checked: a NaN scale is legal, and makes
its whole block NaN, zeros included. A scale of the wrong magnitude goes unnoticed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch
from torch.compiler import is_dynamo_compiling

from cute_nvfp4.errors import OperandError, OperandTypeError, explain, not_quantized
from cute_nvfp4.formats import NVFP4, Format
from cute_nvfp4.pytree import register
from cute_nvfp4.scale_layout import blocked_bytes, blocked_shape, blocked_stride, blocked_view, from_blocked, is_blocked
from cute_nvfp4.tensors import check_dense, memory_of

_BLOCKED_ALIGNMENT = 16  # kernels read four scales of a row at once, and sixteen bytes of an atom through TMA
_MAX_DATA_ALIGNMENT = 16  # the widest load of any architecture has 32 bytes; TMA wants its tensors at 16
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors whose memory kernels can read."""
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class OperandKey:
    """The cache key of an operand: everything that a plan depends on, without addresses and values.

    Equal keys are the same object. rows, k, batch, batched, scale_layout: those of the operand. strides, scale_strides:
    (MN, L) of the data, and of row-major scales, in bytes; 0 for L if there is no batch. data_bytes, scale_bytes: from
    the first byte to after the last. alignment, scale_alignment: the largest power of two, up to 32 bytes, that divides
    the address of every row; new tensors of torch have at least that. plain: whether data and scales are tensors of
    torch's own class. on_cpu: whether they are in host memory.
    """

    format: Format
    rows: int
    k: int
    batch: int
    batched: bool
    scale_layout: str
    device: torch.device
    has_global_scale: bool
    strides: tuple[int, int]
    scale_strides: tuple[int, int]
    data_bytes: int
    scale_bytes: int
    alignment: int
    scale_alignment: int
    plain: bool
    on_cpu: bool

    @functools.cached_property
    def shared(self) -> dict[str, object]:
        """The fields of every operand with this key, except its tensors."""
        return {x: getattr(self, x) for x in ("format", "rows", "k", "batch", "scale_layout")} | {"key": self}


_keys: WeakValueDictionary[tuple, OperandKey] = WeakValueDictionary()  # weak: a key goes with the last that has it
_checked: WeakValueDictionary[tuple, OperandKey] = WeakValueDictionary()  # of checked operands, by what checks read


def _kind(data: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None, format: Format) -> tuple | None:
    """Everything that the checks read; None if torch traces, or if a tensor has no plain dense memory."""
    if is_dynamo_compiling() or not isinstance(format, Format):
        return None
    found = (memory_of(data), memory_of(scale), global_scale is None or memory_of(global_scale), format)
    return None if None in found else found


@dataclass(frozen=True, eq=False, repr=False)
class BlockScaledTensor:
    """A matrix, or a batch of matrices, of block-scaled elements: value = element · scale · global scale.

    data: ``uint8`` or the format's dtype (``float4_e2m1fn_x2``: two elements a byte, the low nibble has the even k),
        (MN, K/2) or (L, MN, K/2); for the 8-bit formats K instead of K/2. K is contiguous; the strides of MN and L
        are free (0 repeats a matrix). The address and the strides are multiples of ``data_alignment`` bytes:
        a block of data, but at most 16.
    scale: ``uint8`` or the format's dtype (``float8_e4m3fn``; ``float8_e8m0fnu`` for MX), one for each block of K,
        * row-major: (MN, K/block) or (L, MN, K/block), as many dimensions as data, columns contiguous; or
        * blocked: the (32, 4, rest_m, 4, rest_k, L) view of memory ordered (L, rest_m, rest_k, 32, 4, 4) that
          ``scale_layout.to_blocked`` returns, or the same bytes in one dimension; 16-byte aligned.
        E4M3 scales are decoded with their sign, and NaN scales (0x7F, 0xFF; 0xFF of UE8M0) propagate.
    global_scale: None, or one float32 number on the same device that multiplies every value (NVFP4 only).

    Errors are ``OperandTypeError`` (a ``TypeError``: a wrong Python type or dtype) and ``OperandError`` (a
    ``ValueError``: all others), and say what was got and what was expected.
    """

    data: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None = None
    # a factory, because torch.compile of torch 2.11 does not follow a default that is an object
    format: Format = field(default_factory=lambda: NVFP4)
    rows: int = field(init=False)
    k: int = field(init=False)
    batch: int = field(init=False)
    scale_layout: str = field(init=False)

    def __post_init__(self) -> None:
        kind = _kind(self.data, self.scale, self.global_scale, self.format)
        if kind is not None and (checked := _checked.get(kind)) is not None:
            self.__dict__.update(checked.shared)
            return
        rows, k, batch = _check_data(self.data, self.format)
        layout = _check_scale(self.scale, self.data, self.format, rows, k, batch)
        if self.global_scale is not None:
            _check_global_scale(self.global_scale, self.data, self.format)
        for name, value in (("rows", rows), ("k", k), ("batch", batch), ("scale_layout", layout)):
            object.__setattr__(self, name, value)
        if kind is not None:
            _checked[kind] = self.key

    @classmethod
    def from_problem(
        cls, data: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None = None, format: Format = NVFP4
    ) -> BlockScaledTensor:
        """An operand from tensors with the batch last, without a copy.

        data: (MN, K/2, L); scale: row-major (MN, K/block, L), or blocked as in the constructor.
        """
        for name, tensor, ndims in (("data", data, (3,)), ("scale", scale, (3, 6, 1))):
            check_dense(name, tensor)
            if tensor.ndim not in ndims:
                expected = "(MN, K, L)" if ndims == (3,) else "(MN, K/block, L), or blocked (six dimensions or one)"
                raise OperandError.of(f"{name} with the batch last", got=_shape(tensor), expected=expected)
        if scale.ndim == 3:
            scale = scale.permute(2, 0, 1)
        return cls(data.permute(2, 0, 1), scale, global_scale, format)

    @classmethod
    def like(
        cls, key: OperandKey, data: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None
    ) -> BlockScaledTensor:
        """An operand with ``key``, from tensors that were made for it; nothing is checked."""
        self = object.__new__(cls)
        # writes past the frozen dataclass, whose own way takes three times as long
        fields = self.__dict__
        fields.update(key.shared)
        fields["data"], fields["scale"], fields["global_scale"] = data, scale, global_scale
        return self

    @functools.cached_property
    def key(self) -> OperandKey:
        """The cache key of plans for this operand, made on first use."""
        data, scale, factor = self.data, self.scale, self.global_scale
        plain = type(data) in PLAIN and type(scale) in PLAIN and (factor is None or type(factor) in PLAIN)
        batched = self.is_batched
        strides = (data.stride(-2), data.stride(0) if batched else 0)
        per_matrix = scale.numel() // self.batch
        scales = (0, per_matrix)
        if self.scale_layout == "rowmajor":
            scales = (scale.stride(-2), scale.stride(0) if batched else 0)
        found = (
            *(self.format, self.rows, self.k, self.batch, batched, self.scale_layout, data.device, factor is not None),
            *(strides, scales, span_bytes(data), span_bytes(scale), row_alignment(data, 32), row_alignment(scale, 32)),
            *(plain, data.device.type == "cpu"),
        )
        return _keys.setdefault(found, OperandKey(*found))

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "key"}  # a key belongs to its process

    @property
    def device(self) -> torch.device:
        """The device that data and scales are on."""
        return self.data.device

    @property
    def is_batched(self) -> bool:
        """Whether data has a batch dimension (``batch`` is 1 without one)."""
        return self.data.ndim == 3

    @property
    def data_alignment(self) -> int:
        """The largest power of two, up to 128 bytes, that divides the address of every row."""
        return row_alignment(self.data, 128)

    def rowmajor_scale(self) -> torch.Tensor:
        """Scales as (L, MN, K/block), whatever their layout: a view if they are row-major, else a copy."""
        if self.scale_layout == "blocked":
            scale = self.scale if self.scale.ndim == 6 else self.blocked_scale()
            return from_blocked(scale, self.rows, self.format.scale_columns(self.k))
        return self.scale if self.is_batched else self.scale.unsqueeze(0)

    def blocked_scale(self) -> torch.Tensor:
        """The (32, 4, rest_m, 4, rest_k, L) view of blocked scales, never a copy; raises if scales are row-major."""
        if self.scale_layout != "blocked":
            raise OperandError.of(
                "scale layout", got=self.scale_layout, expected="blocked", hint="scale_layout.to_blocked converts."
            )
        if self.scale.ndim == 6:
            return self.scale
        return blocked_view(self.scale, self.rows, self.format.scale_columns(self.k), self.batch)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, (MN, K) or (L, MN, K) as data has it; a copy.

        Element · scale is computed in float32, where it is exact, except that MX values beyond 3.4e38 become inf. The
        global scale then multiplies, which rounds once. In float64 nothing rounds and nothing overflows. float16 and
        bfloat16 round the float32 result once more (NVFP4 without a global scale is exact in both).
        """
        if dtype not in _DTYPES:
            raise OperandTypeError.of("dtype to dequantize to", got=dtype, expected=" or ".join(map(str, _DTYPES)))
        data = self.data if self.is_batched else self.data.unsqueeze(0)
        values = self._decode(data, self.rowmajor_scale(), torch.float64 if dtype is torch.float64 else torch.float32)
        if self.global_scale is not None:
            values *= self.global_scale.reshape(()).to(values.dtype)
        values = values.to(dtype)
        return values if self.is_batched else values[0]

    def _decode(self, data: torch.Tensor, rowmajor_scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The values of rows of data (…, K/2) with scales (…, K/block), in float32 or float64; no global scale."""
        values = self.format.decode_data(data, dtype)
        blocks = values.unflatten(-1, (-1, self.format.block))
        blocks *= self.format.decode_scale(rowmajor_scale, dtype).unsqueeze(-1)
        return values

    def __repr__(self) -> str:
        """Shapes and dtypes, never values: printing must not wait for the device."""
        return (
            f"BlockScaledTensor({self.format.name}, rows={self.rows}, k={self.k}, batch={self.batch}, "
            f"{self.data.dtype}, {self.scale_layout} {self.scale.dtype}, global_scale={self.global_scale is not None}, "
            f"{self.device})"
        )


register(BlockScaledTensor, ("data", "scale", "global_scale"))


def span_bytes(x: torch.Tensor) -> int:
    """Bytes from the first element to after the last; 0 for an empty tensor."""
    if not x.numel():
        return 0
    return x.element_size() * (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())))


def row_alignment(x: torch.Tensor, most: int) -> int:
    """The largest power of two, up to ``most`` bytes, that divides the address of every row of ``x``."""
    bits = x.data_ptr() | most
    for size, stride in zip(x.shape[:-1], x.stride()):
        bits |= stride * x.element_size() if size > 1 else 0
    return bits & -bits


def check_pair(a: BlockScaledTensor, b: BlockScaledTensor) -> None:
    """Raises unless ``a`` (L, M, K) and ``b`` (L, N, K) can be multiplied: same K, batch and device."""
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, BlockScaledTensor):
            raise not_quantized(name, operand, "; an a in 16 bits takes a prepared weight, prepare_weight(quantize(b))")
    for what, left, right in (("K", a.k, b.k), ("batch", a.batch, b.batch), ("device", a.device, b.device)):
        if left != right:
            raise OperandError.of(f"{what} of a and b", got=f"{left} and {right}", expected="the same")


def _shape(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"


def _check_data(data: torch.Tensor, fmt: Format) -> tuple[int, int, int]:
    """Rows, K and batch of data, which is checked."""
    if not isinstance(fmt, Format):
        raise OperandTypeError.of("format", got=type(fmt).__name__, expected="cute_nvfp4.formats.Format")
    check_dense("data", data)
    if data.dtype is not torch.uint8 and data.dtype is not fmt.data_dtype:
        raise OperandTypeError.of(
            f"data of {fmt.name}", got=data.dtype, expected=f"{fmt.data_dtype} or torch.uint8 of the same bits"
        )
    shape, stride = data.shape, data.stride()
    if len(shape) == 3:
        batch, rows, columns = shape
    elif len(shape) == 2:
        (rows, columns), batch = shape, 1
    else:
        raise OperandError.of("data", got=_shape(data), expected="(MN, bytes of K) or (L, MN, bytes of K)")
    if rows == 0 or columns == 0 or batch == 0:
        raise OperandError.of("data", got=f"{_shape(data)}", expected="no empty dimension")
    k = columns * fmt.elements_per_byte
    if k % fmt.block:
        raise OperandError.of(
            f"K of {fmt.name}",
            got=f"{k} ({_shape(data)}, {fmt.elements_per_byte} elements a byte)",
            expected=f"a multiple of {fmt.block}, the elements that share a scale",
            hint="Pad K with zeros.",
        )
    if stride[-1] != 1:
        raise OperandError.of(
            "stride of data along K",
            got=f"{stride[-1]} ({_shape(data)}, strides {stride})",
            expected="1",
            hint="from_problem takes tensors with the batch last; .contiguous() copies.",
        )
    alignment = min(fmt.block_bytes, _MAX_DATA_ALIGNMENT)
    bits = address_of(data)
    for size, step in zip(shape[:-1], stride):
        if size > 1:
            bits |= step
    if bits % alignment:
        raise OperandError.of(
            "alignment of data",
            got=f"address {data.data_ptr():#x}, strides {stride}",
            expected=f"multiples of {alignment} bytes",
            hint=".clone() aligns.",
        )
    return rows, k, batch


def _check_scale(scale: torch.Tensor, data: torch.Tensor, fmt: Format, rows: int, k: int, batch: int) -> str:
    """The layout of scales, "blocked" or "rowmajor"; they are checked."""
    check_dense("scale", scale)
    if scale.dtype is not torch.uint8 and scale.dtype is not fmt.scale_dtype:
        raise OperandTypeError.of(
            f"scale of {fmt.name}", got=scale.dtype, expected=f"{fmt.scale_dtype} or torch.uint8 of the same bits"
        )
    if scale.device != data.device:
        raise OperandError.of("device of scale", got=scale.device, expected=f"{data.device}, where the data is")
    columns = k // fmt.block
    ndim = scale.ndim
    if ndim == 6:
        if not is_blocked(scale, rows, columns, batch):
            raise OperandError(_explain_blocked(scale, rows, columns, batch))
    elif ndim == 1:
        size = blocked_bytes(rows, columns, batch)
        if scale.shape[0] != size or scale.stride(0) != 1:
            raise OperandError.of(
                f"blocked scales in one dimension for {rows} rows, K {k}, batch {batch}",
                got=f"{_shape(scale)}, stride {scale.stride(0)}",
                expected=f"shape ({size},), stride 1",
                hint="Rows are padded to 128 and columns to 4.",
            )
    else:
        _check_rowmajor(scale, data, rows, columns)
        return "rowmajor"
    if address_of(scale) % _BLOCKED_ALIGNMENT:
        raise OperandError.of(
            "alignment of blocked scales",
            got=f"address {scale.data_ptr():#x}",
            expected=f"a multiple of {_BLOCKED_ALIGNMENT} bytes",
        )
    return "blocked"


def address_of(tensor: torch.Tensor) -> int:
    """The address of a tensor; 0 while torch traces and it has none yet. Calls of kernels check it again."""
    return 0 if is_dynamo_compiling() or is_wrapper(tensor) else tensor.data_ptr()


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory and stands for others: a fake or functional one, or another library's."""
    kind = type(tensor)
    return kind not in PLAIN and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _explain_blocked(scale: torch.Tensor, rows: int, columns: int, batch: int) -> str:
    shape, stride = blocked_shape(rows, columns, batch), blocked_stride(rows, columns, batch)
    return explain(
        f"blocked scales of {rows} rows, {columns} columns, batch {batch}",
        got=f"{_shape(scale)}, strides {scale.stride()}",
        expected=f"shape {shape}, strides {stride}",
        hint="That is a (32, 4, rest_m, 4, rest_k, L) view of memory ordered (L, rest_m, rest_k, 32, 4, 4).",
    )


def _check_rowmajor(scale: torch.Tensor, data: torch.Tensor, rows: int, columns: int) -> None:
    expected = (*data.shape[:-2], rows, columns)
    if scale.shape != expected:
        blocked = blocked_shape(rows, columns, data.shape[0] if data.ndim == 3 else 1)
        raise OperandError.of(
            f"scale for data of {_shape(data)}",
            got=_shape(scale),
            expected=f"{expected} (row-major), or {blocked} (blocked; its bytes in one dimension will do)",
        )
    if columns > 1 and scale.stride(-1) != 1:
        raise OperandError.of(
            "stride of row-major scales along K",
            got=f"{scale.stride(-1)} ({_shape(scale)}, strides {scale.stride()})",
            expected="1",
            hint=".contiguous() copies.",
        )


def _check_global_scale(value: torch.Tensor, data: torch.Tensor, fmt: Format) -> None:
    if not isinstance(value, torch.Tensor):
        raise OperandTypeError.of(
            "global scale", got=type(value).__name__, expected="None or a float32 tensor of one element"
        )
    check_dense("global scale", value)
    if not fmt.has_global_scale:
        raise OperandError.of(f"global scale of {fmt.name}", got="a tensor", expected="None")
    if value.dtype is not torch.float32:
        raise OperandTypeError.of("global scale", got=value.dtype, expected="torch.float32")
    if value.numel() != 1:
        raise OperandError.of("global scale", got=_shape(value), expected="one element")
    if value.device != data.device:
        raise OperandError.of("device of global scale", got=value.device, expected=f"{data.device}")
