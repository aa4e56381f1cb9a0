"""A folder for ``PYTHONPATH``: Python processes that a program in a simulated session starts are in one too."""
