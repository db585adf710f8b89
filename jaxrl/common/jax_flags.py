"""Flags of JAX with which training and evaluations would draw other random numbers, or fail.

They come from variables such as JAX_DEFAULT_PRNG_IMPL, from `jax.config.update`, or from a context of one thread, such
as `with jax.transfer_guard("disallow")`.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxrl.common.errors import UsageError

_DRAWS = {  # values with which a seed means the same numbers everywhere
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
    "jax_high_dynamic_range_gumbel": False,
}
_ROUNDING = ("jax_enable_x64", "jax_default_matmul_precision")
_HINDRANCES = {"jax_debug_key_reuse": False, "jax_no_execution": False, "jax_no_tracing": False}
_GUARDS = tuple(f"jax_transfer_guard{part}" for part in ("", "_host_to_device", "_device_to_device", "_device_to_host"))


def check_flags(activity: str) -> None:
    """Raise UsageError if JAX is told not to compile, to draw other numbers, or not to move numbers."""
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise UsageError(
            f"JAX_DISABLE_JIT is set, but {activity} is a few large compiled programs: unset it; to debug an "
            "environment without compilation call its reset and step yourself"
        )

    def problems() -> list[str]:
        return [*_find_draws(), *_find_hindrances(), *_find_guards()]

    with ThreadPoolExecutor(1) as thread:  # programs are compiled in threads, which see no context of this one
        found = problems() or thread.submit(problems).result()
    if found:
        raise UsageError(found[0])


def check_draws() -> None:
    """Raise ValueError if JAX is told to draw other numbers."""
    for problem in _find_draws():
        raise ValueError(problem)


def check_transfers() -> None:
    """Raise UsageError if JAX is told not to move numbers between host and devices."""
    for problem in _find_guards():
        raise UsageError(problem)


def flags_of_numbers() -> dict[str, Any]:
    """Return the flags that change numbers, by their variables."""
    return {name.upper(): getattr(jax.config, name) for name in (*_DRAWS, *_ROUNDING) if hasattr(jax.config, name)}


def _find_draws() -> Iterator[str]:
    for name, usual in _DRAWS.items():
        value = getattr(jax.config, name, usual)
        if value != usual:
            yield f"{_describe(name, value)}, with which the same seed gives other random numbers: {_undo(name, usual)}"


def _find_hindrances() -> Iterator[str]:
    for name, usual in _HINDRANCES.items():
        value = getattr(jax.config, name, usual)
        if value != usual:
            yield f"{_describe(name, value)}, with which jaxrl's programs cannot run: {_undo(name, usual)}"


def _find_guards() -> Iterator[str]:
    for name in _GUARDS:
        value = getattr(jax.config, name, None)
        if str(value).startswith("disallow"):
            yield (
                f"{_describe(name, value)}, but jaxrl moves numbers between host and devices: {_undo(name, 'allow')}"
            )


def _describe(name: str, value: Any) -> str:
    return f"{name.upper()} is {value}"


def _undo(name: str, usual: Any) -> str:
    return f"unset it (in a program: jax.config.update('{name}', {usual!r}))"
