"""Problem folders in the public format: a ``task.yml`` and a ``reference.py`` (docs/reference/folders.md)."""
