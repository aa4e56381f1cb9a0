"""Problem folders in the public format: ``task.yml`` with a ``reference.py`` of its own (docs/reference/folders.md)."""
