"""Networks, distributions, optimizers and the dtypes that they compute in."""
