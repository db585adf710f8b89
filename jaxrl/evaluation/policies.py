"""The policies that `evaluate` and `render` run: those in a run's checkpoint, and scripted ones."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from envs_jax import base as environments
from envs_jax.base import closest, short_repr
from envs_jax.batch import BatchedEnvironment, batched
from envs_jax.matches import MatchRules
from envs_jax.progress import final_progress
from jaxrl.algos.base import Algorithm, Mode
from jaxrl.common.errors import UsageError, usage_errors
from jaxrl.common.jax_flags import check_flags
from jaxrl.rl.data_parallel import make_mesh
from jaxrl.runtime import memory_plan, saved_run
from jaxrl.runtime.config import Config
from jaxrl.runtime.load import load_policies
from jaxrl.runtime.rollouts import (
    STEPS,
    Evaluator,
    Opponent,
    both_teams,
    learned_policy,
    scripted_names,
    scripted_policy,
    switch_policy,
)
from jaxrl.runtime.run_directory import choose_checkpoint

_ROLLOUT_BYTES = 2**26, 2**31  # bytes of states and curves rolled out at a time, on a CPU and on an accelerator
# Modes of a run's policy, as far as its algorithm has the mode.
LEARNED: dict[str, Mode] = {"learned": "greedy", "sampled": "sample", "zero_code": "zero_code"}
_GREEDY, _GREEDY_KEY = "greedy", "learned"  # a policy's name for users, and in files


@dataclasses.dataclass(frozen=True)
class PolicySet:
    """An environment and the policies that can act in it; `name` and `settings` make the environment."""

    env: BatchedEnvironment
    name: str
    settings: dict[str, Any]
    # run, config, algo, step: of the run and its checkpoint, None where all policies are scripted
    run: Path | None = None
    config: Config | None = None
    algo: Algorithm | None = None
    params: Any = ()  # the run's policy; where it has several seeds, the policy of the first one
    seed_params: tuple[Any, ...] = ()  # the policies of all seeds, () for a single one
    step: int | None = None
    named_settings: frozenset[str] = frozenset()  # the settings that the command line named
    greedy: bool = False  # it plays matches with its best actions, even where the environment's rules say sampled ones

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of all policies, the run's first."""
        modes = self.algo.modes if self.algo else ()
        return (*(name for name, mode in LEARNED.items() if mode in modes), *scripted_names(self.env))

    @property
    def description(self) -> str:
        if self.config is None:
            return self.name
        return f"{self.config.algo} on {self.name} (run {self.run_name}, checkpoint {self.step:,})"

    @property
    def run_name(self) -> str | None:
        """The run without the folder of runs, such as "coma_coverage/0003"."""
        return "/".join(self.run.absolute().parts[-2:]) if self.run else None

    def check_policies(self, names: Sequence[str]) -> None:
        """Raise UsageError unless there is at least one name, and all are names of policies."""
        known = [display_name(policy) for policy in self.policies]
        if not names:
            raise UsageError(f"--policy names no policy: choose from {', '.join(known)}")
        for name in names:
            if name in LEARNED and self.algo is None:
                name = display_name(name)
                others = ", ".join(known)
                raise UsageError(f"policy '{name}' needs a run: give its directory, or one of {others}")
            if name not in self.policies:
                raise UsageError(f"unknown policy {short_repr(name)}: {closest(name, known)}")

    def with_env_settings(self, settings: Mapping[str, Any]) -> "PolicySet":
        """Return the policies with other environment settings. Raises UsageError if the run's policy does not fit."""
        settings = {**self.settings, **settings}
        env = _make_batched_env(self.name, settings)
        algo = self.algo
        if algo and self.config and settings != self.config.env_settings:
            algo = _refit_algorithm(algo, env, self.params, settings, self.config.env_settings)
        return dataclasses.replace(self, env=env, settings=settings, algo=algo)

    def evaluator(
        self, names: Sequence[str], episodes: int, chunk: int = 0, opponents: Sequence[Opponent] | None = None
    ) -> Evaluator:
        """Return an evaluator that rolls out the policies `names` for at least this many episodes on all local devices.

        It takes what `parameters` returns. With opponents (candidates for the other team, where its actions are an
        input), see `both_teams`. `chunk` is the largest number of episodes rolled out at a time on a device, 0 for a
        choice by memory.

        Raises UsageError: an unknown policy, no opponent for the other team, or flags of JAX that change the numbers.
        """
        check_flags("an evaluation")
        self.check_policies(names)
        rules = self.env.env.match_rules
        algo = self.algo
        if rules and rules.outside is not None and opponents is None:
            raise no_player(rules)
        policies = [
            learned_policy(algo, LEARNED[name]) if algo and name in LEARNED else scripted_policy(self.env, name)
            for name in names
        ]
        policy = switch_policy(self.env, policies)

        def init_carry(params: Any, timestep: Any, indices: Any) -> Any:
            policy_params = params if opponents is None else params[0]
            return algo.init_carry(policy_params[1], timestep, indices) if algo else ()

        devices = 1 if self.env.on_host else min(jax.local_device_count(), episodes)
        local = -(-episodes // devices)
        mesh = make_mesh(devices)
        rounds = -(-local // (chunk or self.choose_chunk(local, mesh)))
        size = -(-local // rounds)
        policy = policy if opponents is None else both_teams(policy, opponents)
        return Evaluator(self.env, policy, devices * rounds * size, mesh, size, init_carry)

    def choose_chunk(self, episodes: int, mesh: Mesh) -> int:
        """Return how many of a device's episodes may be rolled out at a time, by the bytes of states and curves."""
        size = memory_plan.rollout_env_bytes(self.env, episodes, mesh)
        size += 4 * (min(self.env.spec.horizon, STEPS) + 1) * (len(self.env.spec.metrics) + 2)
        return max(1, _ROLLOUT_BYTES[jax.default_backend() != "cpu"] // size)

    def parameters(self, index: int) -> tuple[Any, Any]:
        """Return the parameters with which the functions of `evaluator` run the policy `names[index]`."""
        return np.int32(index), jax.device_get(self.params)  # for any devices

    @property
    def seeds(self) -> int:
        return max(len(self.seed_params), 1)

    def by_seed(self) -> list["PolicySet"]:
        return [dataclasses.replace(self, params=params, seed_params=()) for params in self.seed_params] or [self]

    @property
    def context(self) -> Any:
        """The environment's context at the end of all schedules."""
        return self.env.context(final_progress())


def with_opponents(policy_set: PolicySet) -> PolicySet:
    """Add the opponents of the evaluations that chose the run's best checkpoint, unless the user names some.

    Their strength is constant and they observe the full game; snapshots of the learner are not available.
    """
    rules = policy_set.env.env.match_rules
    plays_opponents = policy_set.run is not None or (rules is not None and rules.outside is not None)
    if rules is None or not plays_opponents or policy_set.named_settings & frozenset(rules.settings):
        return policy_set
    eval_env = policy_set.env.env.for_evaluation()
    return policy_set.with_env_settings({name: getattr(eval_env, name) for name in policy_set.settings})


def announce(
    rollouts: Iterable[tuple[Any, ...]], what: str, say: Callable[[str], None], compiled: bool = False
) -> Iterator[tuple[Any, ...]]:
    """Yield each (name, ..., result) of `rollouts`; say what begins, and how long each took."""
    if not compiled:
        say(f"{what}: compiling, then playing the first ...")
    began = time.monotonic()
    note = "" if compiled else ", compiling included"
    for *names, result in rollouts:
        say(f"{' against '.join(map(display_name, names))}: {what} in {time.monotonic() - began:.1f} s{note}")
        yield *names, result
        began = time.monotonic()
        note = ""


def display_name(policy: str) -> str:
    """Return a policy's name in tables and sentences: "greedy" for the one that files call "learned"."""
    return _GREEDY if policy == _GREEDY_KEY else policy


def policy_key(name: str) -> str:
    """Return a policy's name in files; the inverse of `display_name`."""
    return _GREEDY_KEY if name == _GREEDY else name


def load(
    run: Path | None, env: str, settings: dict[str, Any], best: bool = True, checkpoint: int | None = None
) -> PolicySet:
    """Load the policy of a run in an environment; without a run, the environment's scripted policies.

    Settings of the environment may differ from the run's as far as its policy fits. The checkpoint is the one of this
    number, the best one, or the newest (`best` False).

    Raises UserError: impossible settings, a damaged checkpoint, or a policy that does not fit.
    """
    check_flags("an evaluation")
    batch = _make_batched_env(env, settings)
    if run is None:
        return PolicySet(batch, env, settings)
    first, *others = loaded = load_policies(run, best, checkpoint=checkpoint)
    seeds = tuple(policy.params for policy in loaded) if others else ()
    policy = PolicySet(batch, env, settings, run, first.config, first.algo, first.params, seeds, first.step)
    return policy.with_env_settings({})


def load_run(run: str | Path, best: bool = True) -> PolicySet:
    """Load the policy of a run, or of the folder of a checkpoint, in its own environment; see `load`."""
    run, checkpoint = choose_checkpoint(run)
    directory, config = saved_run.read_run(run)
    return load(directory, config.env, config.env_settings, best, checkpoint)


def no_player(rules: MatchRules) -> UsageError:
    """Return the error for games in which nobody plays the other team."""
    players = " ".join(f"--{name} {value}" for name, value in rules.settings.items())
    return UsageError(f"there is no player for the other team: choose scripted players, such as {players}")


def _make_batched_env(env: str, settings: dict[str, Any]) -> BatchedEnvironment:
    with usage_errors():
        return batched(environments.make(env, **settings))


def _refit_algorithm(
    algo: Algorithm, env: BatchedEnvironment, params: Any, settings: dict[str, Any], trained_settings: dict[str, Any]
) -> Algorithm:
    """Return the algorithm for an environment with other settings than in training. Raises UsageError."""
    changed = ", ".join(f"{name} {value}" for name, value in settings.items() if value != trained_settings[name])
    try:
        algo = dataclasses.replace(algo, spec=env.spec, **algo.acting_settings)
        expected = jax.eval_shape(lambda: algo.policy(algo.init(jax.random.key(0), None)))
    except (ValueError, TypeError) as error:
        raise UsageError(f"the run's policy cannot be used with {changed}: {error}") from None
    needed, loaded = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (expected, params))
    if needed != loaded:
        raise UsageError(
            f"the run's policy does not match {changed}: its networks were built for other shapes: leave that setting "
            "out"
        )
    return algo
