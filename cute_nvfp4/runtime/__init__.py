"""The way from a host function to a launch: compile once, keep on disk, run on a GPU or in the simulator."""
