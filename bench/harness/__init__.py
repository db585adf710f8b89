"""Code that all benchmarks share: flags, results, plots, FLOP counts."""
