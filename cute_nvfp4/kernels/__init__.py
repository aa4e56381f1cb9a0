"""The kernels, a room for each operation, and the arithmetic that they share."""
