"""The blocked scale layout, three ways: torch, Python and CuTe agree with the published formula at every size."""

from __future__ import annotations

import subprocess
import sys

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import from_dlpack

from cute_nvfp4 import scale_layout
from cute_nvfp4.errors import OperandError

ROWS = [1, 2, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 160, 255, 256, 257]
COLS = range(1, 10)
MAX_ROWS, MAX_COLS, BATCH = 300, 9, 2


def published_offset(r: int, c: int, cols: int) -> int:
    """cuBLAS's formula for one matrix, written independently of the constants under test."""
    return 512 * ((r // 128) * -(-cols // 4) + c // 4) + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4


def padded_bytes(rows: int, cols: int) -> int:
    return -(-rows // 128) * 128 * -(-cols // 4) * 4


def blocked_numbers(rows: int, cols: int, batch: int = BATCH) -> torch.Tensor:
    """What lies at each byte of a blocked buffer: 1 + the row-major index of its scale, or 0 for padding."""
    numbers = torch.arange(1, rows * cols * batch + 1).reshape(batch, rows, cols)
    halves = []
    for shift in (0, 8):
        blocked = scale_layout.to_blocked((numbers >> shift & 0xFF).to(torch.uint8))
        flat = torch.as_strided(blocked, (batch * padded_bytes(rows, cols),), (1,))
        halves.append(flat.to(torch.int64) << shift)
    return halves[0] + halves[1]


def offsets(rows: int, cols: int, batch: int = BATCH) -> torch.Tensor:
    """(L, rows, cols) offsets by the published formula."""
    one = torch.tensor([[published_offset(r, c, cols) for c in range(cols)] for r in range(rows)])
    return torch.stack([one + index * padded_bytes(rows, cols) for index in range(batch)])


@pytest.mark.parametrize("cols", COLS)
def test_to_blocked_is_the_published_formula(cols: int) -> None:
    for rows in ROWS:
        want = torch.zeros(BATCH * padded_bytes(rows, cols), dtype=torch.int64)
        for index in range(BATCH):
            for r in range(rows):
                for c in range(cols):
                    at = index * padded_bytes(rows, cols) + published_offset(r, c, cols)
                    want[at] = 1 + (index * rows + r) * cols + c
        assert torch.equal(blocked_numbers(rows, cols), want), (rows, cols)


def test_offset_is_the_published_formula() -> None:
    for rows in (1, 32, 33, 128, 129, 257):
        for cols in COLS:
            got = [
                [[scale_layout.offset(r, c, rows, cols, index) for c in range(cols)] for r in range(rows)]
                for index in range(BATCH)
            ]
            assert torch.equal(torch.tensor(got), offsets(rows, cols)), (rows, cols)


def test_offset_refuses_what_is_outside_the_padding() -> None:
    assert scale_layout.offset(127, 3, 1, 1) == 511
    for row, col, batch in ((128, 0, 0), (0, 4, 0), (-1, 0, 0), (0, 0, -1)):
        with pytest.raises(OperandError, match="0 <= row < 128"):
            scale_layout.offset(row, col, 1, 1, batch)


@cute.jit
def write_cute_offsets(
    out: cute.Tensor, rows: cutlass.Int32, cols: cutlass.Int32, batch: cutlass.Int32, cosize: cute.Tensor
):
    """Evaluates the CuTe layout of traced sizes at every coordinate, on the host."""
    layout = scale_layout.cute_layout(rows, cols, batch)
    cosize[0] = cute.cosize(layout)
    for index in range(batch):
        for r in range(rows):
            for c in range(cols):
                out[(index * rows + r) * cols + c] = cute.crd2idx((r, c, index), layout)


@pytest.fixture(scope="module")
def cute_offsets():
    """(rows, cols) -> (L, rows, cols) offsets by the CuTe layout, and the bytes it spans."""
    out = torch.zeros(BATCH * MAX_ROWS * MAX_COLS, dtype=torch.int32)
    cosize = torch.zeros(1, dtype=torch.int32)
    arguments = from_dlpack(out), cutlass.Int32(1), cutlass.Int32(1), cutlass.Int32(1), from_dlpack(cosize)
    compiled = cute.compile(write_cute_offsets, *arguments)

    def evaluate(rows: int, cols: int) -> tuple[torch.Tensor, int]:
        out.fill_(-1)
        compiled(arguments[0], rows, cols, BATCH, arguments[-1])
        return out[: BATCH * rows * cols].to(torch.int64), int(cosize[0])

    return evaluate


@pytest.mark.parametrize("cols", COLS)
def test_cute_layout_agrees_with_torch_at_every_size(cute_offsets, cols: int) -> None:
    for rows in range(1, MAX_ROWS + 1):
        got, cosize = cute_offsets(rows, cols)
        flat = blocked_numbers(rows, cols)
        assert cosize == flat.numel() == scale_layout.blocked_bytes(rows, cols, BATCH), (rows, cols)
        assert torch.equal(flat[got], torch.arange(1, got.numel() + 1)), (rows, cols)
        assert int((flat != 0).sum()) == got.numel(), (rows, cols)


STATIC_SIZES = ((1, 1, 1), (33, 5, 2), (129, 9, 1), (300, 8, 3))


@cute.jit
def trace_static_layouts(results: cutlass.Constexpr):
    """Collects, while tracing, what CuTe's own algebra makes of the atom, and our layout of static sizes."""
    atom = scale_layout.cute_atom()
    for rows, cols, batch in STATIC_SIZES:
        ours = scale_layout.cute_layout(rows, cols, batch)
        tiled = cute.tile_to_shape(atom, (rows, cols, batch), (2, 1, 3))
        at = [(r, c, index) for index in range(batch) for r in range(rows) for c in range(0, cols, 3)]
        results.append(
            (
                cute.is_static(ours),
                [cute.crd2idx(coordinate, ours) for coordinate in at],
                [cute.crd2idx(coordinate, tiled) for coordinate in at],
                [scale_layout.offset(r, c, rows, cols, index) for r, c, index in at],
            )
        )


def test_static_cute_layout_is_the_atom_tiled_to_shape() -> None:
    results = []
    trace_static_layouts(results)
    assert len(results) == len(STATIC_SIZES)
    for static, ours, tiled, python in results:
        assert static
        assert ours == tiled == python


@pytest.mark.parametrize("rows, cols, batch", [(1, 1, 1), (128, 4, 1), (129, 5, 2), (300, 9, 3)])
def test_blocked_view_follows_the_problem_statement(rows: int, cols: int, batch: int) -> None:
    scale = torch.randint(1, 127, (batch, rows, cols), dtype=torch.uint8).view(torch.float8_e4m3fn)
    blocked = scale_layout.to_blocked(scale)
    assert blocked.shape == (32, 4, -(-rows // 128), 4, -(-cols // 4), batch)
    assert blocked.shape == scale_layout.blocked_shape(rows, cols, batch)
    assert blocked.dtype is torch.float8_e4m3fn
    assert blocked.permute(5, 2, 4, 0, 1, 3).is_contiguous()
    codes, source = blocked.view(torch.uint8), scale.view(torch.uint8)
    for index, i, j in (
        (0, 0, 0),
        (batch - 1, rows - 1, cols - 1),
        (0, rows // 2, cols // 2),
        (batch - 1, 0, cols - 1),
    ):
        assert codes[i % 32, (i % 128) // 32, i // 128, j % 4, j // 4, index] == source[index, i, j]


@pytest.mark.parametrize("rows, cols, batch", [(1, 1, 1), (128, 4, 1), (129, 5, 2), (300, 9, 3)])
def test_from_blocked_inverts_to_blocked(rows: int, cols: int, batch: int) -> None:
    scale = torch.randint(0, 256, (batch, rows, cols), dtype=torch.uint8)
    blocked = scale_layout.to_blocked(scale)
    flat = blocked.permute(5, 2, 4, 0, 1, 3).reshape(-1)
    assert flat.data_ptr() == blocked.data_ptr()
    for layout in (blocked, blocked.clone(memory_format=torch.contiguous_format), flat):
        assert torch.equal(scale_layout.from_blocked(layout, rows, cols), scale)
    view = scale_layout.blocked_view(flat, rows, cols, batch)
    assert view.data_ptr() == blocked.data_ptr() and torch.equal(view, blocked)
    typed = scale_layout.from_blocked(blocked.view(torch.float8_e4m3fn), rows, cols)
    assert typed.dtype is torch.float8_e4m3fn and torch.equal(typed.view(torch.uint8), scale)


def test_to_blocked_takes_a_matrix_and_any_strides() -> None:
    scale = torch.randint(0, 256, (2, 130, 6), dtype=torch.uint8)
    turned = scale.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert not turned.is_contiguous()
    assert torch.equal(scale_layout.to_blocked(turned), scale_layout.to_blocked(scale))
    whole = scale.transpose(1, 2).contiguous().transpose(1, 2)[:, :128, :4]
    assert torch.equal(scale_layout.to_blocked(whole), scale_layout.to_blocked(whole.contiguous()))
    assert torch.equal(scale_layout.to_blocked(scale[1]), scale_layout.to_blocked(scale)[..., 1:])


def test_is_blocked() -> None:
    blocked = scale_layout.to_blocked(torch.zeros(2, 129, 9, dtype=torch.uint8))
    assert scale_layout.is_blocked(blocked, 129, 9, 2)
    assert scale_layout.is_blocked(blocked, 200, 12, 2)
    assert not scale_layout.is_blocked(blocked, 128, 9, 2)
    assert not scale_layout.is_blocked(blocked, 129, 13, 2)
    assert not scale_layout.is_blocked(blocked, 129, 9, 1)
    assert not scale_layout.is_blocked(blocked.contiguous(), 129, 9, 2)
    odd = torch.zeros(512, dtype=torch.uint8).as_strided((32, 4, 1, 4, 1, 1), (16, 4, 7, 1, 3, 5))
    assert scale_layout.is_blocked(odd, 3, 2, 1)


def test_refusals() -> None:
    bytes_ = torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(OperandError, match=r"got 1024 contiguous elements of 1 byte.*expected 512 contiguous bytes"):
        scale_layout.blocked_view(bytes_, 128, 4)
    with pytest.raises(OperandError, match="non-contiguous"):
        scale_layout.blocked_view(bytes_[::2], 128, 4)
    with pytest.raises(OperandError, match=r"4 byte\(s\)"):
        scale_layout.blocked_view(torch.zeros(512), 128, 4)
    with pytest.raises(OperandError, match=r"expected \(32, 4, 1, 4, 1, 1\)"):
        scale_layout.from_blocked(bytes_.reshape(2, 512), 128, 4)
    with pytest.raises(OperandError, match=r"expected \(32, 4, 2, 4, 1, 1\)"):
        scale_layout.from_blocked(scale_layout.blocked_view(bytes_[:512], 128, 4), 129, 4)
    with pytest.raises(OperandError, match="expected 512 contiguous bytes"):
        scale_layout.from_blocked(bytes_[:500], 128, 4)
    with pytest.raises(OperandError, match=r"expected \(MN, KS\) or \(L, MN, KS\)"):
        scale_layout.to_blocked(bytes_)
    with pytest.raises(OperandError, match="positive sizes"):
        scale_layout.to_blocked(torch.zeros(0, 4, dtype=torch.uint8))


def test_import_is_light() -> None:
    """Formats, layouts, operands and references must not pull in the CuTe DSL."""
    code = "import sys, cute_nvfp4.reference, cute_nvfp4.scale_layout; sys.exit('cutlass' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
