"""Networks, distributions, optimizers and compute dtypes."""
