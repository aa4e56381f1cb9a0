"""The layers between a submission and the judge, one by one, in processes that have only them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cute_nvfp4.harness import sandbox

ROOT = Path(sandbox.__file__).parents[2]
# The judge, and a worker forked from it; without Landlock both are an ordinary user, the same.
SCRIPT = """
import os, sys, tempfile
from pathlib import Path
from cute_nvfp4.harness import sandbox
landlock, shielded, root, other_user = (word == "True" for word in sys.argv[1:])
folder = Path(tempfile.mkdtemp())
if not landlock:
    sandbox._CREATE_RULESET = 9999  # a system call that no kernel has
    sandbox._readable_for_all = lambda path: other_user
    if os.geteuid() == 0 and not root:
        os.chmod(folder, 0o777)
        os.setresgid(64999, 64999, 64999)
        os.setresuid(64999, 64999, 64999)
sandbox._libc.prctl(sandbox._SET_DUMPABLE, 1, 0, 0, 0)  # which a change of user has set to 0
if shielded:
    sandbox.shield()
judge = os.getpid()
worker = os.fork()
if worker == 0:
    layers = sandbox.enter(folder, judge)
    def allowed(path):
        try:
            path.write_text("x")
        except OSError:
            return False
        return True
    print(layers, allowed(folder / "inside"), allowed(folder.parent / f"outside-{judge}"), flush=True)
    os._exit(0)
os.waitpid(worker, 0)
"""
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
HAS_LANDLOCK = sandbox._libc.syscall(sandbox._CREATE_RULESET, None, 0, 1) > 0


def tried(landlock: bool, shielded: bool, root: bool = False, other_user: bool = False) -> str:
    command = [sys.executable, "-c", SCRIPT, *map(str, (landlock, shielded, root, other_user))]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.skipif(not HAS_LANDLOCK, reason="the kernel has no Landlock")
@pytest.mark.parametrize("shielded", [False, True])
def test_landlock_keeps_memory_and_files_apart(shielded):
    said = tried(True, shielded)
    assert said.startswith("['landlock") and sandbox.OUT_OF_REACH in said and said.split()[-2:] == ["True", "False"]


def test_a_judge_that_is_not_dumpable_is_out_of_reach_for_its_own_user():
    assert sandbox.OUT_OF_REACH in tried(False, True)


@pytest.mark.skipif(YAMA.exists() and YAMA.read_text().strip() != "0", reason="Yama keeps processes apart")
def test_without_any_layer_it_is_said_that_there_is_none():
    assert tried(False, False).startswith("[]")


@pytest.mark.skipif(os.geteuid() != 0, reason="the user is not root")
@pytest.mark.parametrize("other_user,layer", [(True, "user 65000"), (False, "root without capabilities")])
def test_a_judge_that_is_root_is_out_of_reach_without_landlock(other_user, layer):
    said = tried(False, True, True, other_user)
    assert layer in said and sandbox.OUT_OF_REACH in said and said.split()[-2] == "True"


def test_a_process_that_has_left_its_parents_is_found_by_its_mark():
    code = "import time; print('ready', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-S", "-c", code], env={sandbox.MARK: "abc"}, stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        assert process.pid in sandbox.strays(1 << 30, "abc") and process.pid not in sandbox.strays(1 << 30, "abd")
        sandbox.end([process.pid])
        assert process.wait(timeout=30) == -9
    finally:
        process.kill()
        process.wait()
