"""The kernels, one folder for each operation, and the arithmetic that they share."""
