"""What a run is asked to tell: counters, traces, snapshots of memory."""
