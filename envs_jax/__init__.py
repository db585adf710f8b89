"""Jittable reinforcement-learning environments: pure functions from (state, action) to (state, timestep)."""

from envs_jax.base import Box, Discrete, Environment, EnvSpec, TimeStep, make, register, registered

__all__ = ["Box", "Discrete", "EnvSpec", "Environment", "TimeStep", "make", "register", "registered"]

register("coverage", "envs_jax.coverage.env:Coverage")
