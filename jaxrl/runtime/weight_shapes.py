"""Which settings decide the shapes of a run's weights, for `--init_from` where they do not match."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax

from jaxrl import algos
from jaxrl.algos.base import Algorithm, AlgoState, Custom
from jaxrl.algos.on_policy import FEATURES
from jaxrl.common.errors import UserError, usage_errors
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.runtime.config import Config

ENV = "env"  # a key for the name of the environment and all its settings


def state_shapes(algo: Algorithm) -> AlgoState:
    """Return the shapes and dtypes of an algorithm's state. Raises UsageError."""
    with usage_errors(traced=True):
        shapes: AlgoState = jax.eval_shape(lambda: algo.init(jax.random.key(0), None))
    return shapes


def weight_shapes(algo: Algorithm) -> Any:
    """Return the shapes and dtypes of an algorithm's weights. Raises UsageError."""
    weights = jax.eval_shape(algo.weights, state_shapes(algo))
    return jax.tree.map(lambda x: (x.shape, x.dtype), weights)


def find_causes(here: Config, there: Config, custom: Custom) -> tuple[list[str], list[str]]:
    """Return the settings, as few as possible, whose values in `there` give `here` weights of the shapes of `there`.

    First those that have an effect by themselves, then all of them: layers of a memory need the memory. The environment
    is one setting, `ENV`, where the two have another one. Both are [] where settings are not the cause.

    Args:
        here, there: of runs of one algorithm, whose weights have other shapes.
        custom: the user's networks.
    """

    def find_shapes(names: Collection[str]) -> Any:
        """Return the shapes of `here` with these settings of `there`; None where they are impossible."""
        try:
            return _shapes_of(_replace(here, there, names), custom)
        except UserError:
            return None

    different = find_differences(here, there)
    target, own = find_shapes(different), find_shapes(())
    if target is None or target == own:
        return [], []
    causes = different
    for name in different:
        rest = [other for other in causes if other != name]
        shapes = find_shapes(rest)
        # a setting without which the others are impossible is a cause only if it has an effect by itself
        if shapes == target or (shapes is None and find_shapes([name]) == own):
            causes = rest
    return [name for name in causes if find_shapes([name]) != own] or causes, causes


def find_differences(here: Config, there: Config) -> list[str]:
    """Return the settings of environment and algorithm with other values, or `ENV` for all of the environment's."""
    names = [name for name, value in here.algo_settings.items() if value != there.algo_settings.get(name)]
    if here.env != there.env:
        return [ENV, *names]
    return [name for name, value in here.env_settings.items() if value != there.env_settings.get(name)] + names


def has_effect(name: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a setting has an effect: those of a feature that is off, such as messages, have none."""
    return not any(settings.get(feature) == off and name in names for feature, (off, names) in FEATURES.items())


def _replace(here: Config, there: Config, names: Collection[str]) -> Config:
    if ENV in names:
        here = dataclasses.replace(here, env=there.env, env_settings=there.env_settings)

    def pick(values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
        return {name: others[name] if name in names else value for name, value in values.items()}

    env_settings = pick(here.env_settings, there.env_settings)
    return dataclasses.replace(
        here, env_settings=env_settings, algo_settings=pick(here.algo_settings, there.algo_settings)
    )


def _shapes_of(config: Config, custom: Custom) -> Any:
    """Return the shapes of the weights of a configuration, whatever its sizes of batches. Raises UsageError."""
    cls = algos.find(config.algo)
    with usage_errors():
        algo = cls(
            config.make_env().spec, DataParallel(1), custom=custom, **{**config.algo_settings, **cls.acting_settings}
        )
    return weight_shapes(algo)
