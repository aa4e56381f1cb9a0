"""The folder that a simulated session puts on ``PYTHONPATH``, so that child Python processes open a session too."""
