"""The public functions: train, make_train, load, evaluate. Console, files and signals belong to the session."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optax

from envs_jax import base as environments
from envs_jax.base import Array, Environment
from envs_jax.batch import batched
from envs_jax.settings import ADAPTERS, check_bounds, exact_value, short_repr
from jaxrl import algos
from jaxrl.algos.base import Algorithm, Custom
from jaxrl.algos.multi_stage import MultiStage
from jaxrl.common.errors import UsageError, usage_errors
from jaxrl.common.forks import require_own_process
from jaxrl.common.jax_flags import check_flags
from jaxrl.common.types import check_key
from jaxrl.evaluation import learning_curves, policies, reports, tables
from jaxrl.evaluation.statistics import interval
from jaxrl.report import tables as report_tables
from jaxrl.report.console import Log
from jaxrl.report.writer import read_metrics
from jaxrl.runtime import run as runs
from jaxrl.runtime.build import build_run
from jaxrl.runtime.config import Config, apply_changes
from jaxrl.runtime.load import load_policy
from jaxrl.runtime.policy import Policy
from jaxrl.runtime.presets import base_and_source
from jaxrl.runtime.train_state import Position

Networks = Mapping[str, Any]
Optimizers = Mapping[str, optax.GradientTransformation]


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of `train`.

    Attributes:
        directory: the run directory, with checkpoints and metrics.
        metrics: {name: float64[rows]}, the content of metrics.jsonl, NaN where a row has no such metric.
        policy: of the best checkpoint, else of the newest; of the first seed that has not failed, and of the best
            combination of a sweep.
        reason: why the run ended, a sentence.
        failed: {folder of a trial, such as "seed_1": iteration at which it failed}, of `num_seeds` and `sweep`.
    """

    directory: Path
    metrics: dict[str, np.ndarray]
    policy: Policy
    reason: str
    failed: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Result({str(self.directory)!r}, {len(self.metrics)} metrics, {self.policy!r}, {self.reason!r})"


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Held-out episodes of a policy and of the environment's baselines, from the same initial states.

    Attributes:
        metrics: {name: float32[episodes]}, at the end of each episode.
        baselines: {name of a scripted policy: its metrics}.
        shares: metrics that are 0 or 1 in each episode.
    """

    metrics: dict[str, np.ndarray]
    baselines: dict[str, dict[str, np.ndarray]]
    shares: tuple[str, ...] = ()

    def __getitem__(self, metric: str) -> np.ndarray:
        return self.metrics[metric]

    def __repr__(self) -> str:
        return f"Evaluation({', '.join(self.metrics)}; {', '.join(self.baselines)})"

    def __str__(self) -> str:
        """Return a table of one row per metric: means with their 95 % intervals, of the policy and of each baseline."""
        rows = [
            report_tables.Row(
                name, [self._describe(name, metrics) for metrics in (self.metrics, *self.baselines.values())]
            )
            for name in self.metrics
        ]
        table = report_tables.make_table("", ["policy", *self.baselines], rows)
        episodes = len(next(iter(self.metrics.values())))
        return f"episodes: {episodes:,}; {tables.INTERVALS}\n{report_tables.to_text(table)}"

    def _describe(self, name: str, metrics: dict[str, np.ndarray]) -> str:
        if name not in metrics:  # the score of a task
            return ""
        estimate = {**interval(metrics[name], name in self.shares), "std": None}
        return tables.format_estimate(estimate, tables.choose_digits([estimate]))


def train(
    algo: str | type[Algorithm],
    env: str | type[Environment] | Environment | None = None,
    *,
    preset: str | None = None,
    networks: Networks | None = None,
    optimizers: Optimizers | None = None,
    callbacks: Sequence[Callable[[Mapping[str, Any]], None]] = (),
    progress: bool = True,
    **settings: Any,
) -> Result:
    """Train, as `python -m jaxrl.train` does.

    Args:
        algo: a registered name, "module:Class", or a class.
        env: the same, or an environment instance; None for the preset's.
        preset: a name from configs/ or a YAML file; by default the algorithm's preset, if it has one.
        networks: user-defined flax modules by part, such as {"actor": MyNet()}; see `Algorithm.make_network`.
        optimizers: user-defined optax chains by part, learning rates included.
        callbacks: called after each block with the console's data: "iteration", "env_steps", "return",
            "losses", "environment" and, after an evaluation, "evaluation".
        progress: print what the command prints. Where the logger "jaxrl" takes messages of level INFO they go there
            instead; warnings always do.
        settings: every flag of the command line, such as num_envs=64.

    Raises:
        UserError: a sentence that says what is wrong and how to fix it.
    """
    require_own_process("training")
    if not isinstance(callbacks, Iterable) or not all(map(callable, callbacks)):
        raise UsageError("callbacks must be a list of functions, such as callbacks=[print]")
    progress = _switch("progress", progress)
    config, source = _config_and_source(algo, env, preset, settings)
    custom = _custom(networks, optimizers)
    log = Log(callbacks, label=config.make_env().spec.label, printed=progress)
    for cls in (algo, type(env) if isinstance(env, Environment) else env):
        if isinstance(cls, type) and cls.__module__ == "__main__":
            log.say(
                f"warning: {cls.__name__} is defined in __main__, so no other script will find it to load this run: "
                f"put the class into a file, such as {cls.__name__.lower()}.py, and import it from there"
            )
    outcome = runs.start(config, log=log, custom=custom, source=source)
    learning_curves.report(outcome.directory, log.say)
    chosen = learning_curves.best(outcome.directory, config) if config.run.sweep else ""
    policy = load(outcome.directory / chosen, networks=networks)
    rows = read_metrics(outcome.directory)
    names = dict.fromkeys(name for row in rows for name in row)
    metrics = {name: np.array([row.get(name, np.nan) for row in rows], np.float64) for name in names}
    return Result(outcome.directory, metrics, policy, outcome.sentence, outcome.failed)


def make_train(
    algo: str | type[Algorithm],
    env: str | type[Environment] | Environment | None = None,
    *,
    preset: str | None = None,
    networks: Networks | None = None,
    optimizers: Optimizers | None = None,
    **settings: Any,
) -> Callable[[Array], tuple[Policy, dict[str, dict[str, Array]]]]:
    """Return a whole run as one pure function, for `jax.jit` and `jax.vmap` over seeds; arguments as in `train`.

    It runs on one device, writes nothing and evaluates nothing. With key(seed) it computes what `train` does with this
    seed on one device.

    Returns:
        key[] -> (policy, {phase: {metric: float32[iterations] or float32[iterations, updates]}}). Metrics of episodes
        ("return", "length" and the environment's) are means over the episodes that ended in an iteration, NaN where
        none did.

    Raises:
        UserError: a sentence; also for algorithms that start from other runs.
    """
    require_own_process("training")
    config = _config(algo, env, preset, {"devices": 1} | settings).with_run(eval_every=0)
    for name in ("seed", "num_seeds", "sweep", "runs"):
        if name in settings:
            raise UsageError(f"make_train returns a function of one key that writes no files: leave out {name}")
    if config.run.devices != 1 or config.run.init_from or issubclass(algos.find(config.algo), MultiStage):
        raise UsageError(
            "make_train returns a function of one key, for one device: leave out devices and init_from; if "
            f"'{config.algo}' needs other runs, use jaxrl.train"
        )
    run = build_run(config, custom=_custom(networks, optimizers))
    if run.first_trainer:
        raise UsageError(
            f"make_train returns a function with one environment, but training begins with {run.phases[0].name}: leave "
            "that out, also where the preset has it for a CPU, or use jaxrl.train"
        )
    if run.env.on_host:
        raise UsageError(
            f"make_train returns a function that JAX can vmap, but '{run.env.spec.name}' runs on the host: use "
            "jaxrl.train"
        )
    remaining = Position().remaining(run.algo.phases, run.trainer.layout.num_envs, run.config.run.total_env_steps)
    whole = run.trainer.make_train_fn(remaining)
    with usage_errors(traced=True):
        run.trainer.shapes()

    def train_with_key(key: Array) -> tuple[Policy, dict[str, dict[str, Array]]]:
        check_key(key)
        with usage_errors(traced=True):
            params, metrics = whole(key)
        return Policy(run.env.env, run.algo, params, config=run.config), metrics

    return train_with_key


def load(
    run: str | Path, *, best: bool = True, checkpoint: int | None = None, networks: Networks | None = None
) -> Policy:
    """Return the policy of a run.

    Args:
        run: its directory, such as "runs/coma_coverage/0001" (of several seeds, the first is used), or the folder of
            one seed, "runs/coma_coverage/0001/seed_3", or of one checkpoint.
        best: use the best checkpoint, if there is one; otherwise the newest.
        checkpoint: the number of another checkpoint, which is the name of its folder in checkpoints/.
        networks: the user-defined networks that it was trained with.

    Raises:
        UserError: not a run directory, a damaged checkpoint, or networks that do not fit.
    """
    require_own_process("a policy")
    if not isinstance(run, str | Path):
        raise UsageError(f"name the run's directory, such as 'runs/coma_coverage/0001', not {run!r}")
    if checkpoint is not None:
        checkpoint = _whole("checkpoint", checkpoint, 0, 10**10 - 1)
    return load_policy(run, _switch("best", best), _custom(networks, None), checkpoint)


def evaluate(
    policy: Policy | str | Path,
    env: Environment | None = None,
    *,
    episodes: int = 200,
    seed: int = 0,
    baselines: str | Sequence[str] | None = None,
    greedy: bool = True,
) -> Evaluation:
    """Play held-out episodes, with random numbers that training never uses.

    Args:
        policy: a policy, or the directory of a run (of several seeds, the first is used).
        env: the policy's environment with other settings; None for the training environment, in which scripted players
            are the opponents of a policy that was trained against itself.
        episodes: number of episodes.
        seed: random seed of the held-out episodes.
        baselines: scripted policies (or one) that play the same episodes; None = all of the environment's.
        greedy: take the most probable actions instead of sampling.

    Raises:
        UserError: a sentence that says what is wrong and how to fix it.
    """
    require_own_process("an evaluation")
    check_flags("an evaluation")
    episodes = _whole("episodes", episodes, 1, 1_000_000)
    seed = _whole("seed", seed, 0, 2**32 - 1)
    baselines = [baselines] if isinstance(baselines, str) else baselines
    baselines = list(baselines) if isinstance(baselines, Iterable) else baselines
    if baselines is not None and not (isinstance(baselines, list) and all(isinstance(x, str) for x in baselines)):
        raise UsageError(f"baselines must be a list of names of scripted policies, not {short_repr(baselines)}")
    policy = policy if isinstance(policy, Policy) else load(policy)
    if policy.config is None:
        raise UsageError("this policy has no configuration: use one from load, train or make_train")
    policy_set = policies.PolicySet(batched(policy.env), policy.config.env, _settings(policy.env))
    policy_set = dataclasses.replace(
        policy_set, config=policy.config, algo=policy.algo, params=policy.params, step=policy.step
    )
    if env is not None:
        if type(env) is not type(policy.env):
            raise UsageError(
                f"the policy was trained in {type(policy.env).__name__}, but env is of the type {type(env).__name__}: "
                f"pass a {type(policy.env).__name__}, with settings that fit the networks"
            )
        policy_set = policy_set.with_env_settings(_settings(env))
    else:
        policy_set = policies.with_opponents(policy_set)
    policy_name = "learned" if _switch("greedy", greedy) else "sampled"
    scripted = policies.scripted_names(policy_set.env) if baselines is None else baselines
    metrics_by_policy = {
        name: {metric: curve[-1] for metric, curve in curves.items()}
        for name, curves in reports.rollout(policy_set, [policy_name, *scripted], episodes, seed)
    }
    metrics = metrics_by_policy.pop(policy_name)
    shares = tuple(filter(policy_set.env.spec.is_share, metrics))
    return Evaluation(metrics, metrics_by_policy, shares)


def _config(algo: Any, env: Any, preset: str | None, settings: dict[str, Any]) -> Config:
    return _config_and_source(algo, env, preset, settings)[0]


def _config_and_source(algo: Any, env: Any, preset: str | None, settings: dict[str, Any]) -> tuple[Config, str]:
    """Return the configuration of these arguments, and a line that says which preset it is from."""
    library = "" if isinstance(env, Environment) else type(env).__module__.partition(".")[0]
    if library in (*ADAPTERS, "mujoco_playground"):
        name = {"mujoco_playground": "playground"}.get(library, library)
        raise UsageError(f"env is an object of {library}: pass its name instead, such as env='{name}:NAME'")
    if library in ("gym", "dm_env", "dm_control"):
        raise UsageError(
            f"env is an object of {library}: register its class with Gymnasium, and pass its name, such as "
            "env='gymnasium:my_module:MyEnv-v0'"
        )
    if not isinstance(algo, str | type) or not isinstance(env, str | type | Environment | None):
        raise UsageError("give algo and env by name, such as 'coma' and 'coverage', or your own classes")
    if not isinstance(preset, str | os.PathLike | None):
        raise UsageError(f"preset must be a name from configs/ or a YAML file, not {short_repr(preset)}")
    name = _name(algo) if isinstance(algo, type) else algo
    env_settings = {}
    if isinstance(env, Environment):
        if not environments.is_decorated(type(env)):
            raise UsageError(
                f"{type(env).__name__} must be decorated with @dataclasses.dataclass(frozen=True), so that its fields "
                "are its settings"
            )
        env_settings = _settings(env)
        registered = environments.registered()
        known = env.spec.name in registered and environments.find(env.spec.name) is type(env)
        env = env.spec.name if known else _name(type(env))
    elif isinstance(env, type):
        env = _name(env)
    config, source = base_and_source(name, None if preset is None else str(preset), env)
    return apply_changes(config, env_settings | settings, "the arguments"), source


def _whole(name: str, value: Any, low: int, high: int) -> int:
    """Check a whole number of Python, NumPy or JAX against bounds; return a Python int. Raises UsageError."""
    with usage_errors():
        number: int = exact_value(name, value, int)
        check_bounds(name, number, (low, high))
        return number


def _switch(name: str, value: Any) -> bool:
    """Check True or False of Python, NumPy or JAX; return a bool. Raises UsageError."""
    with usage_errors():
        switch: bool = exact_value(name, value, bool)
        return switch


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _settings(env: Environment) -> dict[str, Any]:
    fields: Any = env
    return {field.name: getattr(env, field.name) for field in dataclasses.fields(fields) if field.init}


def _custom(networks: Networks | None, optimizers: Optimizers | None) -> Custom:
    """Check the user's networks and optimizers. Raises UsageError."""
    for name, value in (("networks", networks), ("optimizers", optimizers)):
        if value is not None and not isinstance(value, Mapping):
            raise UsageError(f"{name} must be a dictionary by part, such as {{'actor': ...}}, not {value!r}")
    for part, network in (networks or {}).items():
        if not callable(network) and not hasattr(network, "apply"):
            raise UsageError(f"networks: '{part}' must be a flax module or a function of the number of outputs")
    for part, optimizer in (optimizers or {}).items():
        if not isinstance(optimizer, optax.GradientTransformation):
            raise UsageError(f"optimizers: '{part}' must be an optax chain, such as optax.adam(1e-3)")
    return Custom(dict(networks or {}), dict(optimizers or {}))
