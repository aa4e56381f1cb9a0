"""The public functions as operators of ``torch.library``: ``torch.ops.cute_nvfp4`` (docs/torch.md).

Importing this package registers all of them. It imports the public functions where they are called only: each of those
asks ``by_operator`` first.
"""
