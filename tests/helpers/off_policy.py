"""Algorithms with a replay, each with a tiny environment that it can act in: tests of the loop run on every row."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from envs_jax import Environment
from envs_jax.base import Array
from envs_jax.batch import batched
from envs_jax.progress import Progress, count, start
from helpers.tiny import Corridor, PointMass
from jaxrl.algos.base import Algorithm, Phase
from jaxrl.algos.ddpg import Ddpg
from jaxrl.algos.off_policy import OffPolicy
from jaxrl.algos.sac import Sac
from jaxrl.algos.student import Student
from jaxrl.nn import optimizers
from jaxrl.rl.data_parallel import DataParallel, logical_shards, make_mesh
from jaxrl.runtime.rollouts import Evaluator, learned_policy
from jaxrl.runtime.trainer import BlockMetrics, Trainer, TrainState

SMALL = {"hidden_size": 16, "batch_size": 16, "buffer_size": 400}
MODERN = SMALL | {
    "first_layer": "relu", "layer_norm": True, "initializer": "he", "num_critics": 2, "n_step": 3,
    "max_grad_norm": 10.0,
    "entropy_weight": 0.01, "logit_weight": 1e-3, "tau": 0.05, "actor_lr": 3e-3, "critic_lr": 5e-3, "eps_start": 0.1,
    "eps_decay": 1.0,
}  # fmt: skip
VARIANTS = {
    "published": SMALL,
    "bicnet": SMALL | {"network": "bicnet"},
    "expected": MODERN | {"action_gradient": "expected"},
}
SAC = SMALL | {
    "hidden_size": 32, "batch_size": 64, "tau": 0.05, "gamma": 0.8, "actor_lr": 3e-3, "critic_lr": 3e-3,
    "alpha_lr": 1e-2,
    "initial_alpha": 0.1, "target_entropy": -3.0,
}  # fmt: skip
SAC_MODERN = SAC | {
    "layer_norm": True, "num_critics": 3, "n_step": 3, "max_grad_norm": 10.0,
    "actor_update_period": 2, "target_update_period": 3,
}  # fmt: skip
CONTINUOUS = SMALL | {
    "hidden_size": 32, "batch_size": 64, "first_layer": "relu", "tau": 0.05, "gamma": 0.8, "actor_lr": 3e-3,
    "critic_lr": 3e-3, "max_grad_norm": 0.0, "num_critics": 2, "target_noise": 0.2, "actor_update_period": 2,
    "target_update_period": 2,
}  # fmt: skip
TEACHER = {
    "context_length": 4, "embedding_size": 8, "feedforward_size": 8, "num_heads": 2, "num_layers": 1, "hidden_size": 8,
}  # fmt: skip
STUDENT = {
    "teacher_constant_steps": 100,
    "teacher_until_step": 500,
    "target_update_period": 1,
    "resolved_inputs": json.dumps(TEACHER),
}


def follow_walk(observation: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """Observations of a corridor [..., A, length + 1] that follow observations and actions [..., A]."""
    place = np.clip(observation.argmax(-1) + 2 * answer.astype(int) - 1, 0, observation.shape[-1] - 1)
    return np.eye(observation.shape[-1])[place]


def follow_push(observation: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """The same of point masses [..., A, D + 1] and actions [..., A, D]."""
    place = np.clip(observation[..., :-1] + 0.5 * np.clip(answer, -1, 1), -1, 1)
    return np.concatenate([place, observation[..., -1:]], axis=-1)


class Case(NamedTuple):
    """An algorithm with settings, in an environment whose next observation `follows` from (observation, answer)."""

    algo: type[OffPolicy]
    env: Environment
    settings: dict[str, Any]
    follows: Callable[[np.ndarray, np.ndarray], np.ndarray]


CASES = {f"ddpg {name}": Case(Ddpg, Corridor(num_agents=2), chosen, follow_walk) for name, chosen in VARIANTS.items()}
CASES["ddpg continuous"] = Case(Ddpg, PointMass(num_agents=2, tasks=2), CONTINUOUS | {"random_steps": 128}, follow_push)
CASES["sac"] = Case(Sac, PointMass(num_agents=2, tasks=2), SAC | {"random_steps": 128}, follow_push)
CASES["sac modern"] = Case(Sac, PointMass(num_agents=2, tasks=2), SAC_MODERN, follow_push)
CASES["student"] = Case(Student, PointMass(tasks=2), SAC | STUDENT, follow_push)


class Compiled(Trainer):
    """A trainer that compiles each of its programs once, however often it is asked for them."""

    @functools.cached_property
    def _programs(self) -> dict[str, Callable[..., Any]]:
        return {}

    def make_init(self) -> Callable[..., Any]:
        return self._once("init", super().make_init)

    def make_block(self, phase: Phase | None) -> Callable[..., Any]:
        return self._once(f"block {phase and phase.name}", functools.partial(super().make_block, phase))

    def _once(self, name: str, make: Callable[[], Any]) -> Callable[..., Any]:
        if name not in self._programs:
            self._programs[name] = make()
        return self._programs[name]


@functools.cache  # tests with the same arguments share the programs
def make_trainer(
    algo: type[OffPolicy], env: Environment, num_envs: int = 8, devices: int = 1, **settings: Any
) -> Trainer:
    """A trainer whose blocks have up to 400 iterations, with an update for each step of the batch by default."""
    if "env_steps_per_update" in {field.name for field in dataclasses.fields(algo)}:
        settings = {"env_steps_per_update": float(num_envs)} | settings
    shards = logical_shards(num_envs, algo.batch(env.spec, settings, num_envs))
    layout = DataParallel(num_envs, shards, devices)
    algorithm = algo(env.spec, layout, **settings)
    return Compiled(batched(env), algorithm, layout, make_mesh(devices), 400, 0, jnp.dtype("float16"), 4000)


def trainer_of(case: str, devices: int = 1, **settings: Any) -> Trainer:
    """The same for a row of `CASES`, with sixteen environments and `settings` on top; rates fall to nothing."""
    algo, env, case_settings, _ = CASES[case]
    return make_trainer(
        algo, env, 16, devices, **(case_settings | {"update_interval": 4, "final_lr_fraction": 0.0} | settings)
    )


def run(trainer: Trainer, iterations: int) -> tuple[TrainState, BlockMetrics]:
    """The phases before the last one, and so many iterations of training."""
    state = trainer.init(jax.random.key(0))
    for phase in trainer.algo.phases[:-1]:
        state, _ = trainer.make_block(phase)(state, jnp.int32(phase.iterations))
    state, metrics = trainer.make_block(trainer.algo.phases[-1])(state, jnp.int32(iterations))
    assert int(metrics.iterations) == iterations and int(metrics.not_finite) == -1
    return state, metrics


def score_after(trainer: Trainer, seed: int, iterations: int, metric: str) -> float:
    """The mean of a metric in held-out episodes after training, of an algorithm with a single phase."""
    (phase,) = trainer.algo.phases
    state, _ = trainer.make_block(phase)(trainer.init(jax.random.key(seed)), jnp.int32(iterations))
    acts = learned_policy(trainer.algo)
    evaluator = Evaluator(trainer.env, acts, 256, make_mesh(1), init_carry=trainer.algo.init_carry)
    results = evaluator.jit_final_values()(trainer.policies(state), jax.random.key(9), ())
    return float(np.mean(results[metric]))


def keys_as_numbers(tree: Any) -> Any:
    """Return the tree with random keys as arrays of their words."""

    def as_numbers(leaf: Array) -> Array:
        return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    return jax.tree.map(as_numbers, tree)


def digest(tree: Any) -> dict[str, str]:
    """A hash of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(keys_as_numbers(tree))
    return {
        jax.tree_util.keystr(path): hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()[:12] for path, leaf in leaves
    }


def assert_close(first: Any, second: Any, tolerance: float) -> None:
    """Two states agree: whole numbers and keys are equal, real numbers up to the rounding of sums."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    first, second = keys_as_numbers((first, second))
    pairs = zip(jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(second), strict=True)
    for (path, one), other in pairs:
        one, other = np.asarray(one), np.asarray(other)
        if np.issubdtype(one.dtype, np.floating):
            if "['qkv']['bias']" in jax.tree_util.keystr(path):  # keys' third changes nothing: its gradient is rounding
                one, other = (np.delete(x, slice(len(x) // 3, 2 * len(x) // 3)) for x in (one, other))
            floor = 1e-3 if one.ndim else 0.1  # metrics are differences of larger numbers
            scale = max(float(np.abs(one).max(initial=0)), floor)
            np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path))
        else:
            np.testing.assert_array_equal(one, other, err_msg=jax.tree_util.keystr(path))


def outputs_of(algo: OffPolicy, part: str) -> Callable[..., Array]:
    """A network's outputs for its parameters and observations, compiled."""
    return jax.jit(functools.partial(algo.outputs, part))


def at_step(steps: int) -> Progress:
    """After so many steps of the batch of one environment."""
    return dataclasses.replace(start(), vector_steps=count(steps), env_steps=count(steps))


def with_epsilon(algorithm: type[Algorithm], epsilon: float) -> type[Any]:
    """The algorithm with another epsilon of Adam, above the rounding of gradients, for comparisons of learners."""

    @dataclasses.dataclass(frozen=True)
    class Own(algorithm):  # type: ignore[valid-type,misc]
        def optimizer(self, part: str) -> optax.GradientTransformation:
            return optimizers.adam(epsilon, 0.0 if part == "alpha" else self.max_grad_norm)

    return Own
