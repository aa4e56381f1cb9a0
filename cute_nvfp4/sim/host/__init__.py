"""The host side of a launch: the compiled host code, and what the GPU answers when it asks."""
