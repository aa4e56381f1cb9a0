"""The host side of a launch: compiled host code, and the properties of the GPU that it asks for."""
