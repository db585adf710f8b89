"""Learners as a worker runs them: one environment that all know, equal networks, batches and updates per step.

sac and td3 train on Pendulum-v1, ppo on CartPole-v1, of gymnax for learners in JAX, else of Gymnasium; greedy policies
are scored in Gymnasium for all. The clock holds CPU seconds, with compilation, without scoring.
"""

import dataclasses
import functools
import itertools
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.peers import libraries
from bench.peers.tasks import ENVS, EPOCHS, MINIBATCHES, STEPS, TASKS, Act, Task, Watch

EPISODES = 32
HELD_OUT = 2**20  # seed of the first episode that scores
EVALUATIONS = 7  # at least: five times between scores


class Clock:
    """Scores a policy now and then while its clock is stopped."""

    def __init__(self, task: Task, target: float) -> None:
        self.task = task
        self.target = target
        # {"env_steps", "updates", "cpu", "compile", "return"} of each score; CPU seconds since the start
        self.rows: list[dict[str, float]] = []
        self._spent = 0.0
        self._compiling = 0.0
        self._running = True
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        self._since = self._mark = _now()

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and self._running:
            # of the CPU seconds since the compiler ended last, those in which it ran: the load changes with time
            now = _now()
            cpu, wall = now - self._mark
            self._compiling += float(cpu * min(duration_secs / wall, 1.0))
            self._mark = now

    def evaluate(self, env_steps: int, updates: int, act: Act) -> bool:
        """Score; return whether to stop: the score has been reached, and the speed is known."""
        self._spent += float((_now() - self._since)[0])
        self._running = False
        score = score_policy(self.task.gymnasium, act)
        row = {"env_steps": env_steps, "updates": updates, "cpu": self._spent, "compile": self._compiling}
        self.rows.append(row | {"return": score})
        self._since = self._mark = _now()
        self._running = True
        return self.reached is not None and len(self.rows) >= EVALUATIONS

    @property
    def reached(self) -> dict[str, float] | None:
        """The first row with the score, None where there is none."""
        return next((row for row in self.rows if row["return"] >= self.target), None)


def _now() -> Any:
    """Return CPU and wall seconds, float64[2]."""
    return np.array([time.process_time(), time.perf_counter()])


def score_policy(name: str, act: Act) -> float:
    """Return the mean return of held-out episodes in Gymnasium, all at once."""
    import gymnasium

    envs = [gymnasium.make(name) for _ in range(EPISODES)]
    observation = np.stack([env.reset(seed=HELD_OUT + n)[0] for n, env in enumerate(envs)]).astype(np.float32)
    total = np.zeros(EPISODES)
    running = np.ones(EPISODES, bool)
    while running.any():
        timestep: Any = types.SimpleNamespace(observation=jnp.asarray(observation)[:, None])
        action = np.asarray(act(None, timestep, None)[0])[:, 0]
        for n in np.flatnonzero(running):
            observation[n], reward, terminated, truncated, _ = envs[n].step(action[n])
            total[n] += float(reward)
            running[n] = not (terminated or truncated)
    return float(total.mean())


def learn(peer: str, algo: str, seed: int, quick: bool) -> dict[str, Any]:
    """Train until a score is reached, and `EVALUATIONS` times scored, or the steps are used up.

    Returns:
        the scores, "updates_per_second" (median over the times between scores, without the first, which compiles),
        "cpu_to_score" and "env_steps_to_score", None where it is not reached, and "compile_seconds".
    """
    task, target, every = TASKS[algo]
    if quick:
        target = -np.inf
        every = ENVS * STEPS if algo == "ppo" else task.random_steps + 64
    for name in IMPORTS[peer]:  # before the clock runs
        libraries.module(name)
    clock = Clock(task, target)
    LEARNERS[peer](algo, task, seed, Watch(every, clock.evaluate))
    rows = clock.rows
    # The first updates, and compilation, lie before the second score at the latest.
    between = [(b["updates"] - a["updates"]) / (b["cpu"] - a["cpu"]) for a, b in itertools.pairwise(rows[1:])]
    reached = clock.reached
    return {
        "scores": rows,
        "target": target if np.isfinite(target) else None,
        "updates_per_second": float(np.median(between)) if between else None,
        "cpu_to_score": reached["cpu"] if reached else None,
        "env_steps_to_score": reached["env_steps"] if reached else None,
        "compile_seconds": rows[-1]["compile"],
    }


# Ours


def _settings(algo: str, task: Task) -> tuple[str, dict[str, Any]]:
    """Return our algorithm and its settings for one of the three."""
    settings: dict[str, Any] = {"total_env_steps": task.steps, "devices": 1, "eval_every": 0}
    settings |= {"num_envs": task.num_envs, "hidden_size": task.hidden_size, "gamma": task.gamma}
    settings |= {"actor_lr": task.learning_rate, "critic_lr": task.learning_rate}
    if algo == "ppo":
        return "ppo", settings | {
            "rollout_steps": STEPS, "num_minibatches": MINIBATCHES, "num_epochs": EPOCHS, "depth": 2,
            "final_lr_fraction": 1.0, "entropy_weight": 0.01, "max_grad_norm": 0.5,
        }  # fmt: skip
    settings |= {
        "env_steps_per_update": 1.0, "batch_size": task.batch_size, "buffer_size": task.steps, "tau": task.tau,
        "compute_dtype": "float32",
        "random_steps": 0, "learning_starts": task.random_steps,  # else all updates that random steps are worth follow
    }  # fmt: skip
    if algo == "sac":
        return "sac", settings | {"alpha_lr": task.learning_rate}
    return "ddpg", settings | {
        "num_critics": 2, "actor_update_period": 2, "target_update_period": 2, "exploration_noise": 0.1,
        "target_noise": 0.2, "target_noise_clip": 0.5, "first_layer": "relu", "initializer": "he", "max_grad_norm": 0.0,
    }  # fmt: skip


def _ours(algo: str, task: Task, seed: int, watch: Watch, library: str) -> None:
    """Train our learner on an environment of gymnax, or on the host in one of gymnasium."""
    from jaxrl.runtime.build import build_run
    from jaxrl.runtime.compiling import compile_run
    from jaxrl.runtime.config import apply_changes
    from jaxrl.runtime.policy import Policy
    from jaxrl.runtime.presets import base_and_source
    from jaxrl.runtime.program import Program
    from jaxrl.runtime.train_state import Position

    name, settings = _settings(algo, task)
    config = base_and_source(name, None, f"{library}:{task.gymnasium}")[0]
    run = build_run(apply_changes(config, settings, "the peers"))
    compiled = compile_run(run, None, lambda sentence: None)
    phases = run.algo.phases
    envs = run.trainer.layout.num_envs
    assert compiled.start is not None
    state = compiled.start(run.trainer.keys(seed), None)
    position = Position()
    while any(left := position.remaining(phases, envs, task.steps)):
        index = next(n for n, iterations in enumerate(left) if iterations)
        if index != position.phase:
            position = dataclasses.replace(position, phase=index, iteration=0)
            state = dataclasses.replace(state, phase=np.int32(index), iteration=np.uint32(0))
        block = compiled.blocks[index]
        phase = phases[index]
        assert isinstance(block, Program)
        iterations = min(left[index], run.config.run.block_iterations)
        if phase.steps:
            missing = watch.every - position.env_steps % watch.every
            iterations = min(iterations, -(-missing // (phase.steps * envs)))
        state, metrics = block(state, np.int32(iterations))
        jax.block_until_ready(metrics)
        position = position.after(phase, envs, iterations)
        if phase.steps and position.env_steps % watch.every < phase.steps * envs:
            policy = Policy(run.env.env, run.algo, run.algo.policy(state.algo), config=run.config)

            def act(carry: Any, timestep: Any, key: Any, policy: Policy = policy) -> tuple[Any, Any]:
                return policy(timestep.observation, carry=carry)

            if watch.evaluate(position.env_steps, position.updates, act):
                return


IMPORTS: dict[str, tuple[str, ...]] = {
    "ours": ("gymnax", "jaxrl.runtime.build"),
    "ours_on_host": ("gymnax", "gymnasium", "jaxrl.runtime.build"),
    "brax": ("brax.envs", "brax.training.agents.sac.train"),
    "sb3": ("torch", "stable_baselines3"),
    "sbx": ("sbx", "stable_baselines3"),
    "rejax": ("rejax",),
    "cleanrl": ("torch", "gymnasium", "tyro"),
}
LEARNERS: dict[str, Callable[[str, Task, int, Watch], None]] = {
    "ours": functools.partial(_ours, library="gymnax"),
    "ours_on_host": functools.partial(_ours, library="gymnasium"),
    "brax": libraries.train_brax,
    "sb3": functools.partial(libraries.train_sb3, library="stable_baselines3"),
    "sbx": functools.partial(libraries.train_sb3, library="sbx"),
    "rejax": libraries.train_rejax,
    "cleanrl": libraries.train_cleanrl,
}
