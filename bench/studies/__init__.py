"""Studies behind docs/results.md: learning curves, ablations and comparisons of settings."""
