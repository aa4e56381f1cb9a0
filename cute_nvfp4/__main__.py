"""``python -m cute_nvfp4`` is the ``cute-nvfp4`` command."""

from .cli.main import app

if __name__ == "__main__":
    app(prog_name="cute-nvfp4")
