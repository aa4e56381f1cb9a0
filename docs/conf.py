"""Sphinx's configuration. The repository is the source folder, so that links of pages work as in the checkout."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from cute_nvfp4 import __version__  # noqa: E402

project = "cute_nvfp4"
author = copyright = "the authors of cute_nvfp4"
version = release = __version__
html_title = f"cute_nvfp4 {__version__}"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "reference_directives"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**.md",
    "benchmarks/README.md",
    "benchmarks/records/*.md",
    "notebooks/README.md",
    "notebooks/*.ipynb",
    "notebooks/course/*.ipynb",
]
exclude_patterns = ["**/.ipynb_checkpoints", "docs/_site"]

# pages: GitHub's Markdown, whose anchors are those of headings
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
suppress_warnings = [
    "myst.header",  # records begin sections of their own below a title
    "misc.highlighting_failure",  # pseudo-code in fences
]
nb_execution_mode = "off"  # notebooks show their stored outputs; the tests execute them
nb_output_stderr = "remove"
smartquotes = False  # an option keeps its two hyphens

# reference: the docstrings are reStructuredText with sections in Google's style
autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": False}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_google_docstring, napoleon_numpy_docstring = True, False
nitpicky = False

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_show_copyright = False
