"""Processes that a program in a session starts are in one too, and are not once it has ended."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import subprocess
import sys

import torch

from cute_nvfp4.runtime.session import simulated_gpu

ASK = "import torch; print(torch.cuda.is_available() and torch.cuda.get_device_capability(), torch.version.cuda)"


def device_of_a_tensor() -> tuple[str, tuple[int, int]]:
    return str(torch.zeros(3, device="cuda").device), torch.cuda.get_device_capability()


def test_a_pool_of_processes_is_in_the_session():
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "CUTE_NVFP4_SESSION")}
    with simulated_gpu("sm_103a", checks=True, allow=("race",)):
        told = json.loads(os.environ["CUTE_NVFP4_SESSION"])
        assert told["checks"] and told["allow"] == ["race"]
        context = multiprocessing.get_context("spawn")  # a forkserver of earlier tests is not in the session
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            assert pool.submit(device_of_a_tensor).result() == ("cuda:0", (10, 3))
        done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
        assert done.stdout == "(10, 3) 13.0\n"
    assert before == {name: os.environ.get(name) for name in before}
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    assert not done.stdout.startswith("(10, 3)")


def test_a_child_keeps_the_sitecustomize_it_would_have_had(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.was_here = True\n")
    code = "import sys; print(sys.was_here, 'torch' in sys.modules)"
    with simulated_gpu("sm_100a"):
        paths = os.pathsep.join([os.environ["PYTHONPATH"], str(tmp_path)])
        environment = os.environ | {"PYTHONPATH": paths}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "True False\n"
