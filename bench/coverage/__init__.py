"""Multi-UAV mapping in plain NumPy, one mission at a time: test oracle and speed baseline.

`oracle` holds the rules, `oracle_baselines` the scripted policies, `torch_learner` a PyTorch COMA learner. None of it
shares code with the environments in `envs_jax`; agreement of the two is evidence for both.
"""
