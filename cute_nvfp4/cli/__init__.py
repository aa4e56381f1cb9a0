"""The ``cute-nvfp4`` command: one file a subcommand. Heavy modules are imported when a command runs."""
