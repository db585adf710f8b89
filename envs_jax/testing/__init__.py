"""`check_env`: the contract of every environment, in this package or your own.

    from envs_jax.testing import check_env
    print(check_env(MyEnv(size=5)))  # ok: ...

It plays some copies for one whole episode and into the next one, and raises `ContractError`, with one sentence that
says what is wrong and how to fix it, at the first rule that is broken. `check_types` is the part that plays nothing.
"""

from typing import Any

import jax

from envs_jax.base import Array, Environment, EnvSpec, is_decorated
from envs_jax.batch import batched
from envs_jax.testing.play import MOST_STEPS, Check
from envs_jax.testing.spec import ContractError, check_spec

__all__ = ["ContractError", "check_env", "check_types"]


@jax.disable_jit(False)  # it looks at programs, also where JAX_DISABLE_JIT is set to debug one
def check_types(env: Environment) -> EnvSpec:
    """Check the class, the spec, and what reset, step and the spec's functions return; compile and play nothing.

    Weakly typed values pass here, since training fixes their types; `check_env` refuses them where types then differ.

    Returns:
        the spec.

    Raises:
        ContractError: the first rule that is broken, in one sentence.
    """
    return _check_types(env, 0.0, 1, weak=True).spec


def _check_types(env: Environment, tolerance: float, copies: int, weak: bool) -> Check:
    """Return the checks of an environment, of which those of the class, the spec and types have passed."""
    cls: Any = type(env)
    if not (issubclass(cls, Environment) and is_decorated(cls)):
        raise ContractError(
            f"{cls.__name__} must subclass envs_jax.Environment and be decorated with "
            "@dataclasses.dataclass(frozen=True), so that its fields are its settings"
        )
    check = Check(env, check_spec(env), batched(env), tolerance, copies, weak)
    check.types(jax.eval_shape(lambda: jax.random.key(0)), check.context_types())
    return check


@jax.disable_jit(False)
def check_env(
    env: Environment,
    steps: int | None = None,
    key: Array | None = None,
    copies: int = 4,
    random: bool = True,
    tolerance: float = 1e-6,
) -> str:
    """Check everything that training relies on.

    Args:
        env: the environment; choose small settings, every copy is checked on the host at every step.
        steps: calls of step; by default one episode, the restart and one step more (at most 2,000).
        key: root of all randomness; key(0) by default.
        copies: copies played side by side.
        random: False for a deterministic environment, where copies never differ by their keys.
        tolerance: how far floats of a single copy may be from the same copy in a batch,
            |a - b| <= tolerance (1 + |b|); integers and booleans must be equal.

    Returns:
        "ok: ...", what was checked; print it in a script of your own.

    Raises:
        ContractError: the first rule that is broken, or the environment runs on the host.
    """
    check = _check_types(env, tolerance, copies, weak=False)
    spec = check.spec
    if check.batch.on_host:
        raise ContractError(
            f"'{spec.name}' runs on the host, where check_env cannot repeat a step: check it with the tools of its "
            "library (gymnasium.utils.env_checker.check_env, pettingzoo.test.parallel_api_test)"
        )
    key = jax.random.key(0) if key is None else key
    context = check.context()
    check.repeatable(key, context)
    played = min(spec.horizon + 2, MOST_STEPS) if steps is None else steps
    start = check.play(key, context, played)
    check.baselines(*start)
    if random:
        check.randomness(*start)
    return f"ok: {spec.name} keeps the contract ({copies} environments, {played:,} steps)"
