"""Jittable reinforcement-learning environments: pure functions from (state, action) to (state, timestep)."""

from envs_jax.base import Box, Discrete, Environment, EnvSpec, TimeStep, make, register, registered

__all__ = ["Box", "Discrete", "EnvSpec", "Environment", "TimeStep", "make", "register", "registered"]

register("coverage", "envs_jax.coverage.env:Coverage")
register("reach", "envs_jax.reach.env:Reach")
register("reach_family", "envs_jax.reach.env:ReachFamily")
register("snakes", "envs_jax.snakes.env:Snakes")
register("snakes_3v3", "envs_jax.snakes.env:Snakes")
register("snakes_1v1", "envs_jax.snakes.env:Snakes1v1")
register("snakes_2p", "envs_jax.snakes.env:Snakes2p")
register("snakes_5p", "envs_jax.snakes.env:Snakes5p")
