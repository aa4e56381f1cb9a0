"""How long a launch would take: a clock over what the simulator executes (docs/explanation/timing.md); modelled."""
