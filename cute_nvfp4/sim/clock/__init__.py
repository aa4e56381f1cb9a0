"""How long a launch would take: a clock over what the simulator executes (docs/timing.md). Its times are modelled."""
