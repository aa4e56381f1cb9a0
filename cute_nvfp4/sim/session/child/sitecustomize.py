"""Opens a session in a child process: Python loads this module at startup, because its folder is on ``PYTHONPATH``.

The session is like the parent's. It begins when the process has imported torch and lasts as long as the process.
Nothing of the package is imported before, so that processes without torch start as fast as ever.
"""

import importlib.machinery
import importlib.util
import os
import sys


class _AfterTorch:
    """An import finder that opens the session when torch has been loaded."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            from cute_nvfp4.sim.session.children import enter

            enter()

        spec.loader.exec_module = exec_module
        return spec


def _load_the_one_behind():
    """Runs the ``sitecustomize`` that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    if os.environ.get("CUTE_NVFP4_SESSION"):
        sys.meta_path.insert(0, _AfterTorch())
    _load_the_one_behind()
