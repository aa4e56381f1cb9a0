"""A submission as it was read before anything ran: its file, and the files beside it."""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import HarnessError, SubmissionError

MOST_BYTES = 16 << 20
"""Most bytes of a submission's files together."""


@dataclass(frozen=True)
class Submission:
    """A submission. source: of the file at ``path``; files: that file and those beside and below it, by name."""

    path: Path
    source: str
    files: dict[Path, bytes]

    @classmethod
    def read(cls, path: Path) -> Submission:
        """Reads a submission; raises as ``read_submission`` does.

        It reads files beside it up to ``MOST_BYTES`` together: Python files first, each kind by size.
        """
        source, folder = read_submission(path), path.resolve().parent
        found = {Path(path.name): path.read_bytes()}
        names = [name for name in _files_below(folder) if (folder / name).is_file()]
        names.sort(key=lambda name: (name.suffix != ".py", (folder / name).stat().st_size))
        left = MOST_BYTES
        for name in names:
            left -= (folder / name).stat().st_size
            if left < 0:
                break
            try:
                found.setdefault(name, (folder / name).read_bytes())
            except OSError:
                continue  # unreadable for the judge: the submission does without it
        return cls(path, source, found)

    def copy_to(self, folder: Path) -> Path:
        """Writes all files below ``folder``, and returns the path of the submission's own file."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder / self.path.name

    def beside(self, files: dict[Path, bytes]) -> Submission:
        """This submission beside ``files``, which replace files of its folder with the same names."""
        own = {name: content for name, content in self.files.items() if name not in files}
        return replace(self, files=own | {name: files[name] for name in files if name != Path(self.path.name)})

    @property
    def leaderboard(self) -> str | None:
        """The problem that the submission's first comment names, or None."""
        return directives(self.source).get("leaderboard")


_DEEPEST, _MOST_FILES = 3, 1000


def _files_below(folder: Path) -> list[Path]:
    """Relative names of the files below ``folder``, without hidden files and Python's caches."""
    found: list[Path] = []
    for here, folders, files in os.walk(folder):
        depth = len(Path(here).relative_to(folder).parts)
        shown = [name for name in sorted(folders) if not name.startswith((".", "__pycache__"))]
        folders[:] = shown if depth < _DEEPEST else []
        found += [Path(here, name).relative_to(folder) for name in sorted(files) if not name.startswith(".")]
    found.sort(key=lambda name: len(name.parts))
    return found[:_MOST_FILES]


def read_submission(path: Path) -> str:
    """The source of a submission, after all checks that need no execution.

    Raises:
        HarnessError: no such file.
        SubmissionError: the file is not Python source; the message shows the line.
    """
    if not path.is_file():
        raise HarnessError(f"submission {path} does not exist; it is a Python file with custom_kernel(data)")
    try:
        source = path.read_text()
        ast.parse(source, filename=str(path))
    except SyntaxError as error:
        line = (error.text or "").rstrip()
        caret = " " * max((error.offset or 1) - 1, 0) + "^"
        raise SubmissionError(
            f"syntax error in {path}, line {error.lineno}: {error.msg}\n  {line}\n  {caret}"
        ) from error
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise SubmissionError(f"submission {path} cannot be read as Python source: {error}") from error
    return source


def directives(source: str) -> dict[str, str]:
    """The ``#!POPCORN name value`` lines of the first comment block."""
    found: dict[str, str] = {}
    for line in source.splitlines():
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            break
        if stripped.startswith("#!POPCORN"):
            name, _, value = stripped.removeprefix("#!POPCORN").strip().partition(" ")
            found[name] = value.strip()
    return found
