"""A clock that models how long a GPU takes for a launch that the simulator executes (docs/explanation/clock.md)."""
