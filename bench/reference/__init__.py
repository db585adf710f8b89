"""Independent NumPy and PyTorch implementations: test oracles and benchmark baselines."""
