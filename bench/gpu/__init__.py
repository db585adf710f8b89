"""What this machine's GPU reaches, and whether its results are right: `python -m bench.gpu --out DIR`."""
