"""Snakes on a torus: two teams compete for beans (the "3v3 snakes" competition game of the Jidi platform).

Rules, observations, rewards and scripted players after the public repositories jidiai/Competition_3v3snakes and
zhizhengzhao/snake, their bugs included.

Modules: `board` cells and planes, `rules` the game, moves and collisions, `respawn` where snakes come back, `spawn`
random turns, beans and starts, `segments` games as lists of cells, `opponents` the table of scripted opponents,
`schedule` their schedule, `observation` the published layouts, `obs_full` and `obs_heading` better ones, `territory`
their features beyond the crop, `reward`, `types` state and settings, `teams` the game from each team's side,
`timesteps` time steps and metrics, `env` the environment, `baselines`, `viewer`. Layout letters: n snakes, K beans, A
agents, H rows.
"""

from envs_jax.snakes.env import Snakes, Snakes1v1, Snakes2p, Snakes5p

__all__ = ["Snakes", "Snakes1v1", "Snakes2p", "Snakes5p"]
