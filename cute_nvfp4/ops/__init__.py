"""The public functions, one file an operation: check, plan, compile once, launch.

``from cute_nvfp4 import gemm`` and its like are the public names; the modules also have ``compile_…`` functions.
"""
