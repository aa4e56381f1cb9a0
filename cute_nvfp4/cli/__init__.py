"""The ``cute-nvfp4`` command, one file for each subcommand. Heavy modules are imported when a command runs."""
