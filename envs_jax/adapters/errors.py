"""Errors of adapters, and how they name the errors of others; without JAX, which workers do not import."""

from envs_jax.settings import short_repr


class UnfitError(Exception):
    """An environment cannot be adapted; the message goes on after its name."""


class AdapterError(ValueError):
    """A package, or an environment of it, cannot be used here; the message is one sentence."""


def describe_error(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message."""
    line = short_repr((str(error).strip() or "no message").splitlines()[0].rstrip("."), 200)[1:-1]
    return f"{type(error).__name__}: {line}"
