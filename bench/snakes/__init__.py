"""The six-snake game in plain Python and NumPy, one game at a time: test oracle and speed baseline.

`oracle` holds the rules, the observations and the rewards, `oracle_opponents` the scripted players. None of it shares
code with the environments in `envs_jax`; agreement of the two is evidence for both.
"""
