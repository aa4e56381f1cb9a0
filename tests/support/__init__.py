"""What several folders of tests share: problems of each operation, mutants, recordings, processes, sampling of
sweeps."""
