"""Benchmarks of this machine's GPU, and checks of its results: `python -m bench.gpu --out DIR`."""
