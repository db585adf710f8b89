"""Code that all benchmarks share: flags, results, tables, FLOP counts."""
