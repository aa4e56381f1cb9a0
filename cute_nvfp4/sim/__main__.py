"""``python -m cute_nvfp4.sim SCRIPT [ARGS…]``: the same as ``cute-nvfp4 sim``."""

from cute_nvfp4.cli.sim import app

if __name__ == "__main__":
    app(prog_name="python -m cute_nvfp4.sim")
