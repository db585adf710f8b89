"""Recorded missions of coverage, replayed by the environment.

Recorded moves, readings and messages are injected; beliefs, observations, critic states, rewards, masks and metrics
are compared.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import envs_jax
from bench.parity.comparison import Comparison
from bench.parity.records import CoverageRecord, coverage_mission
from envs_jax.coverage import observation, terrain

SPACING = 5  # metres
# Bounds for rounding, about five times the deviations on CPUs.
FLOAT32 = {
    "belief": 5e-5, "observation": 1e-5, "critic input": 1e-5, "reward": 1e-5, "return_abs": 1e-5, "entropy": 1e-6
}  # fmt: skip
INT16 = {  # beliefs in steps of 1/1350.78
    "belief": 2e-4, "observation": 3e-5, "critic input": 3e-5, "reward": 1e-4, "return_abs": 1e-4, "entropy": 3e-5,
    "f1": 4e-4,
}  # fmt: skip


@functools.cache
def launch(env: Any) -> Any:
    """`env.begin`, compiled once for equal environments."""
    return jax.jit(env.begin)


@functools.cache
def advance(env: Any) -> Any:
    """`env.observe_and_fuse`, compiled once for equal environments."""
    return jax.jit(env.observe_and_fuse)


@functools.cache
def critic(num_actions: int) -> Any:
    """Input of the critic, compiled once for an action set."""
    return jax.jit(functools.partial(observation.critic_input, num_actions=num_actions))


def environment(record: CoverageRecord, **settings: Any) -> Any:
    """Make the environment of a recorded mission."""
    config = record.config
    return envs_jax.make(
        "coverage",
        num_agents=record.num_agents,
        budget=config["budget"],
        q=config["pixel"],
        num_actions=config["num_actions"],
        prior=config.get("prior", 0.5),
        **settings,
    )


def lattice(metres: np.ndarray) -> np.ndarray:
    """Convert positions to steps of the lattice, int32[..., 3]."""
    return metres.astype(np.int32) // SPACING - np.array([0, 0, 1], np.int32)


def rectangle(record: CoverageRecord) -> terrain.Terrain:
    """Return the recorded ground truth."""
    top, bottom, left, right = (int(v) for v in record["truth_bounds"])
    return terrain.Terrain(
        rows=jnp.array([[top, bottom], [0, 0]], jnp.int32),
        columns=jnp.array([[left, right], [0, 0]], jnp.int32),
        invert=jnp.array(False),
        bits=(),
        count=jnp.array((bottom - top) * (right - left), jnp.int32),
    )


def probability(env: Any, beliefs: np.ndarray) -> np.ndarray:
    """Return probabilities of stored beliefs."""
    stored = np.where(beliefs == env.storage.unseen, env.storage.start, beliefs).astype(np.float64) / env.storage.unit
    return 1.0 / (1.0 + np.exp(-stored))


def whole_map(record: CoverageRecord, k: int) -> np.ndarray:
    """bool[A, n, n]: the readings of measurement k in their places."""
    maps = np.zeros((record.num_agents, record.n, record.n), bool)
    for agent, (top, bottom, left, right) in enumerate(record["footprint"][k]):
        maps[agent, top:bottom, left:right] = record.reading(k, agent)
    return maps


@functools.lru_cache(maxsize=4)
def replay(name: str, **settings: Any) -> tuple[Any, list[Any], list[Any]]:
    """(environment, maps, time steps) k = 0 .. T of a recorded mission. Raises NoRecordError."""
    record = coverage_mission(name)
    env = environment(record, **settings)
    state = launch(env)(jax.random.key(0), rectangle(record), lattice(record["positions"][0]), np.float32(0))
    maps = []
    timesteps = []
    for k in range(record.steps + 1):
        heard = record["comm"][k] if k < record.steps else np.eye(record.num_agents)
        state, timestep = advance(env)(
            state, lattice(record["positions"][k]), np.asarray(heard, bool), whole_map(record, k)
        )
        maps.append(jax.tree.map(np.asarray, state.maps))
        timesteps.append(jax.tree.map(np.asarray, timestep))
    return env, maps, timesteps


def compare(name: str, belief_dtype: str, **settings: Any) -> Comparison:
    """Compare a recorded mission with its replay. Raises NoRecordError.

    Args:
        name: of the mission.
        belief_dtype: "float32" or "int16".
        settings: further ones of the environment.
    """
    record = coverage_mission(name)
    comparison = Comparison()
    env, states, timesteps = replay(name, belief_dtype=belief_dtype, **settings)
    f1 = 2.0 / int(np.sum(record.truth))  # one cell more or less
    bounds = {"float32": FLOAT32 | {"f1": f1}, "int16": INT16}[belief_dtype]

    def close(what: str, ours: Any, theirs: Any) -> None:
        comparison.close(what, ours, theirs, bounds[what])

    part, cells = ("", slice(None)) if "belief_global" in record else ("_probe", record["probe_cells"])
    for k, (maps, timestep) in enumerate(zip(states, timesteps, strict=True)):
        beliefs = maps.beliefs[:, : env.n, : env.n]  # without the padding of "pallas"
        p = probability(env, beliefs.reshape(len(beliefs), -1)[:, cells])
        close("belief", p[-1], record[f"belief_global{part}"][k].reshape(-1))
        close("entropy", timestep.metrics["entropy"], record["eval_entropy"][k + 1])
        close("f1", timestep.metrics["f1"], record["eval_f1_tie0"][k + 1])
        comparison.exact("end", timestep.terminated, k == record.steps)
        if k == record.steps:
            break
        close("belief", p[:-1], record[f"belief_fused{part}"][k].reshape(record.num_agents, -1))
        close("observation", timestep.observation, record["obs"][k])
        others = critic(env.num_actions)(timestep, record["action"][k].astype(np.int32))
        close("critic input", np.asarray(others)[..., 7:], record["state_extra"][k])
        comparison.exact("mask", timestep.action_mask, record["mask_boundary"][k].astype(bool))
        if k > 0:
            close("reward", timestep.reward, record["reward"][k])
            close("return_abs", timestep.metrics["return_abs"], record["reward_abs"][k])
    return comparison
