"""COMA in small: algorithms for a made-up spec, their updates as plain functions, and rollouts to learn from."""

import dataclasses
from typing import Any

import jax
import numpy as np

from envs_jax import Box, Discrete, EnvSpec, TimeStep
from envs_jax.progress import Progress, count, start
from jaxrl.algos.base import AlgoState, Learner, Trajectory
from jaxrl.algos.coma import Coma, ComaParameters
from jaxrl.nn.team_policy import Situation
from jaxrl.rl.data_parallel import DataParallel

VECTOR = EnvSpec(
    name="vector",
    num_agents=2,
    observation=Box((3,)),
    action=Discrete(4),
    horizon=5,
    critic_input_spec=Box((3,)),
    critic_input=lambda timestep, action: timestep.observation,
)


def small(
    num_envs: int = 6,
    spec: EnvSpec = VECTOR,
    layout: dict[str, Any] | None = None,
    kind: type[Coma] = Coma,
    **settings: Any,
) -> Coma:
    """An algorithm whose epochs have two minibatches."""
    defaults: dict[str, Any] = {
        "minibatch_size": num_envs * spec.horizon * spec.num_agents // 2,
        "num_epochs": 2,
        "hidden_size": 8,
        "actor_lr": 1e-2,
        "critic_lr": 1e-2,
    }
    return kind(spec, DataParallel(num_envs, **(layout or {})), **(defaults | settings))


def init_params(algo: Coma) -> ComaParameters:
    """Fresh parameters by key 0."""
    return jax.jit(lambda: algo.init(jax.random.key(0), None).replicated)()


def progress(**changes: Any) -> Progress:
    """Nothing done yet, but for `changes` (counters as ints)."""
    shares = ("fraction", "total_env_steps")
    counters = {name: np.float32(value) if name in shares else count(value) for name, value in changes.items()}
    return dataclasses.replace(start(), **counters)


def make_update(algo: Coma, part: str) -> Any:
    """A step on the critic or the actor: (learner, samples [S, m, ...], progress) -> (learner, metrics)."""

    def update(learner: Learner, samples: dict[str, Any], at: Progress) -> tuple[Learner, dict[str, Any]]:
        empty = ComaParameters(actor=None, critic=None, target=None)  # type: ignore[arg-type]
        params = dataclasses.replace(empty, **{part: learner})
        rows = {name: x[:, :, None, None] for name, x in samples.items()}  # of one step of one agent
        params, _, metrics = algo.update(part, params, rows | {"situation": Situation((), ()), "carry": ()}, at)
        return getattr(params, part), metrics

    return update


def make_values(algo: Coma) -> Any:
    """Values of (weights of a critic, its inputs [N, ...]), [N, n]."""
    return lambda critic, inputs: algo.values(critic, inputs[:, None, None])[:, 0, 0]


def prepare(algo: Coma) -> Any:
    """Transitions of a trajectory, [S, samples, ...], of the arguments of `Coma.prepare`, in one program."""
    make_rows = jax.jit(lambda params, *rollout: algo.prepare(AlgoState(params, ()), *rollout).data)

    def make_samples(*arguments: Any) -> dict[str, np.ndarray]:
        rows = make_rows(*arguments)
        return {name: np.asarray(x)[:, :, 0, 0] for name, x in rows.items() if name not in ("situation", "carry")}

    return make_samples


def random_timestep(generator: np.random.Generator, lead: tuple[int, ...], spec: EnvSpec) -> TimeStep:
    """A made-up time step [*lead, ...] in which nothing ends."""
    agents = spec.num_agents
    flags = np.zeros(lead, bool)
    return TimeStep(
        observation=generator.random((*lead, agents, *spec.observation.shape)).astype(np.float32),
        action_mask=np.ones((*lead, agents, 4), bool),
        reward=generator.normal(size=(*lead, agents)).astype(np.float32),
        terminated=flags,
        truncated=flags,
        first=flags,
    )


def make_batch(algo: Coma) -> tuple[Trajectory, TimeStep]:
    """Made-up rows [T, B] and what follows them."""
    generator = np.random.default_rng(5)
    envs = algo.layout.num_envs
    lead = (algo.spec.horizon, envs)
    action = generator.integers(0, 4, (*lead, 2)).astype(np.int32)
    mask = generator.random((*lead, 2, 4)) < 0.5
    np.put_along_axis(mask, action[..., None], True, -1)
    extras = {"mask": mask, "log_prob": -generator.random((*lead, 2)).astype(np.float32)}
    last = dataclasses.replace(random_timestep(generator, (envs,), algo.spec), truncated=np.ones(envs, bool))
    return Trajectory(random_timestep(generator, lead, algo.spec), action, extras), last


def close(a: Any, b: Any, atol: float, rtol: float = 0.0) -> None:
    """Equality in float64 up to tolerances."""
    np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), atol=atol, rtol=rtol)


def flat(tree: Any) -> np.ndarray:
    """All leaves one after another, float64."""
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])


def unflatten(vector: np.ndarray, like: Any) -> Any:
    """The inverse of `flat` for a tree with leaves as in `like`."""
    leaves, structure = jax.tree.flatten(like)
    parts = np.split(vector, np.cumsum([leaf.size for leaf in leaves])[:-1])
    return jax.tree.unflatten(structure, [p.reshape(leaf.shape) for p, leaf in zip(parts, leaves, strict=True)])


def gradient_of(new: Learner, old: Learner) -> np.ndarray:
    """The gradient of one Adam step, all layers flat, from its first moments (beta 0.9) before and after."""
    after, before = (next(s.mu for s in learner.opt_state if hasattr(s, "mu")) for learner in (new, old))
    return (np.float64(after) - 0.9 * np.float64(before)) / 0.1
