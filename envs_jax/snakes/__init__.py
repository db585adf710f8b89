"""Snakes on a torus: two teams compete for beans (the "3v3 snakes" competition game of the Jidi platform).

Rules, observations, rewards and scripted players after the public repositories jidiai/Competition_3v3snakes and
zhizhengzhao/snake, their defects included.

Where to find what: `board` cells, planes and lanes, `rules` what a game is, moves and collisions, `respawn` where
snakes come back, `draws` all that is random, `segments` games from and to lists of cells, `room` which boards are large
enough, `opponents` scripted players, `schedule` who plays when, `observation` the published layouts, `full` the better
one, `reward`, `env` what ties them together, `baselines`. Layout letters: n snakes, K beans, A agents, H rows.
"""

from envs_jax.snakes.env import Snakes, Snakes1v1, Snakes2p, Snakes5p

__all__ = ["Snakes", "Snakes1v1", "Snakes2p", "Snakes5p"]
