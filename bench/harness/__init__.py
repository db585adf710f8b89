"""What all benchmarks share: flags, results, plots, counting of operations."""
