"""What a run can record beside its results: counters, traces, snapshots of memory."""
