"""Builds the documentation's site: ``python docs/build.py --strict`` writes it into ``docs/_site``.

It needs the extra ``docs``. With ``--strict`` it first checks that the tables are those of their records
(``tables.py``), and then treats every warning of Sphinx as an error: links, anchors, references, docstrings, notebooks.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
SITE = DOCS / "_site"


def main(arguments: list[str] | None = None) -> int:
    """Builds the site. Returns the exit code: 0 if it is built and, with ``--strict``, without a warning."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strict", action="store_true", help="warnings and tables that differ are errors")
    parser.add_argument("--out", type=Path, default=SITE, help="the folder of the site (default: docs/_site)")
    parser.add_argument("--check", action="store_true", help="read and resolve all pages, write none")
    parser.add_argument("--skip-tables", action="store_true", help="do not compare tables with their records")
    asked = parser.parse_args(arguments)
    if importlib.util.find_spec("myst_nb") is None or importlib.util.find_spec("furo") is None:
        print(
            "got no Sphinx with its extensions, expected the extra: pip install -c constraints.txt -e '.[docs]'",
            file=sys.stderr,
        )
        return 2
    if asked.strict and not asked.skip_tables and (stale := _stale()):
        print("\n".join(stale), file=sys.stderr)
        return 1
    from sphinx.cmd.build import main as sphinx

    strict = ["-W", "--keep-going", "-E"] if asked.strict else []
    cache = asked.out / ".doctrees"
    builder = "dummy" if asked.check else "html"
    return sphinx(["-q", "-b", builder, "-c", str(DOCS), "-d", str(cache), *strict, str(DOCS.parent), str(asked.out)])


def _stale() -> list[str]:
    """The tables that differ from their records, a line each."""
    sys.path.insert(0, str(DOCS))
    import tables

    return tables.differences()


if __name__ == "__main__":
    raise SystemExit(main())
