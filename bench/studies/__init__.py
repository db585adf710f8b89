"""Studies for docs/results.md: learning curves, ablations and comparisons of settings."""
