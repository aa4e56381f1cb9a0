"""``%%cute`` in a notebook's kernel: a cell runs in the simulated GPU, and says what it did and what is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from jupyter_client.provisioning import local_provisioner
from nbclient import NotebookClient
from support import forked

from cute_nvfp4.display import magic
from cute_nvfp4.sim import Launch, Program
from cute_nvfp4.sim.session import LaunchRecord

COPY = """%%cute copies
import torch
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def copy_kernel(x: cute.Tensor, y: cute.Tensor, step: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    y[thread * step] = x[thread * step] + 1.0

@cute.jit
def copy(x: cute.Tensor, y: cute.Tensor, step: cutlass.Constexpr):
    copy_kernel(x, y, step).launch(grid=[1, 1, 1], block=[32, 1, 1])

x = torch.arange(256, dtype=torch.float32, device="cuda")
y = torch.zeros_like(x)
copy(from_dlpack(x), from_dlpack(y), 1)
copy(from_dlpack(x), from_dlpack(y), 8)
print(torch.equal(y[::8], x[::8] + 1))
"""
TURNED = """%%cute turned
from cutlass.memory import SmemAllocator

@cute.kernel
def turn_kernel(x: cute.Tensor, y: cute.Tensor, synced: cutlass.Constexpr):
    lane, _, _ = cute.arch.thread_idx()
    tile = SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout((32, 32), stride=(32, 1)), 16)
    for i in cutlass.range(32, unroll=1):
        tile[lane, i] = x[i, lane]
    if cutlass.const_expr(synced):
        cute.arch.sync_warp()
    for i in cutlass.range(32, unroll=1):
        y[i, lane] = tile[i, lane]

@cute.jit
def turn(x: cute.Tensor, y: cute.Tensor, synced: cutlass.Constexpr):
    turn_kernel(x, y, synced).launch(grid=[1, 1, 1], block=[32, 1, 1])

x = torch.arange(1024, dtype=torch.float32, device="cuda").reshape(32, 32)
y = torch.zeros_like(x)
turn(from_dlpack(x), from_dlpack(y), True)
print(torch.equal(y, x.t()))
"""
RACY = "%%cute racy --no-time\nturn(from_dlpack(x), from_dlpack(y), False)\nprint('not reached')\n"
ALL = RACY.replace("racy --no-time", "every --no-time --continue").replace("not reached", "reached")
STUCK = """%%cute stuck --no-time --trace
@cute.kernel
def wait_kernel():
    barrier = SmemAllocator().allocate_array(cutlass.Int64, 1)
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 2)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if thread == 0:
        cute.arch.mbarrier_arrive(barrier)
    cute.arch.mbarrier_wait(barrier, 0)

@cute.jit
def wait():
    wait_kernel().launch(grid=[1, 1, 1], block=[64, 1, 1])

wait()
"""
TUTORIAL = (Path(__file__).parents[3] / "docs" / "tutorials" / "first_notebook.md").read_text()
FIRST, *_ = re.findall(r"```text\n(%%cute .*?)```", TUTORIAL, re.DOTALL)
TOO_MANY = FIRST.replace("block=[128, 1, 1]", "block=[160, 1, 1]").replace("%%cute first", "%%cute far --continue")
CELLS = (
    "import cute_nvfp4\n%load_ext cute_nvfp4",
    COPY,
    "assert not copies.hazards and len(copies.launches) == 2\ncopies.result",
    TURNED,
    "turned.result.bank_conflicts",
    RACY,
    "racy.hazards",
    ALL,
    "every.hazards, every.result.instructions == turned.result.instructions - 1",
    STUCK,
    "cute_nvfp4.show(stuck.barriers)",
    "stuck.trace",
    "try:\n    stuck.result\nexcept ValueError as error:\n    print(error)",
    "%%cute broken --no-time\nx = undefined_name\n",
    "%%cute odd --arch sm_42\n1\n",
    "cute_nvfp4.show(racy)",
    "page = copies.profile()\npage.value('Global Load Sectors'), page.python[0].where, page.grid",
    FIRST,
    TOO_MANY,
    "far.hazards, far.error is None, far.launches[0].result, far.findings",
    "from cute_nvfp4.sim.session import current_session\ncurrent_session() is None",
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict]]:
    """Outputs of every cell."""
    folder = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    patch = pytest.MonkeyPatch()
    patch.setattr(local_provisioner, "launch_kernel", forked.KernelProcess)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    try:
        NotebookClient(notebook, timeout=120, allow_errors=True, resources=folder, record_timing=False).execute()
    finally:
        patch.undo()
    return [cell.outputs for cell in notebook.cells]


def words(some: list[dict]) -> str:
    """What the outputs of a cell say in words."""
    return "".join(o.get("text") or o.get("data", {}).get("text/plain") or f"{o.ename}: {o.evalue}" for o in some)


def of(outputs: list[list[dict]], text: str) -> str:
    return words(outputs[CELLS.index(text)])


def test_a_cell_runs_and_its_launches_are_counted(outputs: list[list[dict]]) -> None:
    said = of(outputs, COPY)
    lines = [line for line in said.splitlines() if line.startswith("copy_kernel")]
    assert said.startswith("True") and len(lines) == 2
    # 32 lanes of four bytes are four sectors, or 32 where each lane is eight floats further on
    assert "8 (100% useful)" in lines[0] and "64 (12% useful)" in lines[1]


def test_a_result_is_shown_as_a_table(outputs: list[list[dict]]) -> None:
    (shown,) = outputs[2]
    assert shown["data"]["text/html"].startswith("<div><table>") and "copies.py:10" in shown["data"]["text/plain"]


def test_bank_conflicts_are_counted(outputs: list[list[dict]]) -> None:
    assert of(outputs, TURNED).startswith("True") and words(outputs[4]) == str(32 * 31)


def test_a_hazard_is_shown_with_its_lines_and_ends_the_cell(outputs: list[list[dict]]) -> None:
    said = of(outputs, RACY)
    assert "hazard: Race" in said and "turned.py:9: tile[lane, i] = x[i, lane]" in said and "not reached" not in said
    assert words(outputs[6]) == "['race-in-warp']"
    assert "/tmp" not in said and "kernel_cutlass" not in said


def test_or_the_cell_goes_on_past_it(outputs: list[list[dict]]) -> None:
    assert "reached" in of(outputs, ALL) and words(outputs[8]) == "(['race-in-warp'], True)"


def test_what_waits_for_ever_shows_its_barriers(outputs: list[list[dict]]) -> None:
    assert "hazard: Deadlock" in of(outputs, STUCK) and "1 of 2 arrivals" in of(outputs, STUCK)
    assert "barrier (mbarrier 0x400) (1): warp 0 -> warps 0 to 1: count 2, 0 phases" in words(outputs[10])
    assert "unfinished: 1 of 2 arrivals missing" in words(outputs[10])
    assert set(outputs[10][0]["data"]) == {"image/svg+xml", "text/plain"}
    assert "<script>" in outputs[11][0]["data"]["text/html"] and "warp 1: compute" in words(outputs[11])
    assert "1 launches, of which none ended" in words(outputs[12])


def test_a_run_can_be_shown_and_profiled(outputs: list[list[dict]]) -> None:
    assert "turned.py:9: tile[lane, i] = x[i, lane]" in words(outputs[15])
    assert words(outputs[16]) == "(32, 'copies.py:10', (1, 1, 1))"


def test_the_cell_of_the_tutorial_runs(outputs: list[list[dict]]) -> None:
    """With more threads than elements, as the page asks, it stops."""
    said = of(outputs, FIRST)
    assert said.startswith("[0.0, 2.0, 4.0, 6.0]") and "double_kernel  1     128" in said
    assert "hazard: OutOfBounds" in of(outputs, TOO_MANY) and "y[thread] = x[thread] * 2.0" in of(outputs, TOO_MANY)
    assert words(outputs[19]) == "(['OutOfBounds'], False, None, [])"


def test_errors_of_the_program_are_its_own(outputs: list[list[dict]]) -> None:
    assert words(outputs[13]).startswith("NameError: name 'undefined_name'")
    assert "OperandError: %%cute: argument --arch: invalid choice: 'sm_42'" in words(outputs[14])


def test_nothing_is_left_of_the_simulated_gpu(outputs: list[list[dict]]) -> None:
    assert words(outputs[-1]) == "True"


def test_dimensions_keep_their_places() -> None:
    """Only ones at the end are left out of a grid and a block."""
    made = [Launch("k", grid, block, ()) for grid, block in (((1, 4, 1), (32, 1, 2)), ((4, 1, 1), (1, 1, 1)))]
    page = magic.launches([LaunchRecord(j, launch, Program.parse("")) for j, launch in enumerate(made)])
    rows = [re.split(r"  +", line.strip()) for line in page.words.splitlines() if "stopped" in line]
    assert [row[1:3] for row in rows] == [["1 x 4", "32 x 1 x 2"], ["4", "1"]]
