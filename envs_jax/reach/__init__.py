"""Reach: a simulated Sawyer arm brings its tool centre to a point (the task reach of the Meta-World benchmark).

Rules after T. Yu et al., "Meta-World: A Benchmark and Evaluation for Multi-Task and Meta Reinforcement Learning",
CoRL 2019, arXiv 1910.10897, and the public repository Farama-Foundation/Metaworld (version 3.1.1, MIT licence). The arm
moves as MuJoCo moves it, without contacts; the puck does not move. `sawyer_reach_constants.json` holds the numbers of
the compiled model, with their source and licence.

Modules: `constants` numbers of the arm, `folding` sums and products of known numbers, `dynamics` one control step,
`kernel` the same as one kernel for GPUs, `tasks` the table of tasks and how to add one, `goals` draws of puck and goal,
`observation`, `reward`, `types` state and settings, `env` the environment, `baselines`. Inside, coordinates are leading
axes and copies trailing ones.
"""

from envs_jax.reach.env import Reach, ReachFamily

__all__ = ["Reach", "ReachFamily"]
