"""The refusal of commands and of the Python API in a process in which JAX would wait forever."""

from envs_jax.forks import check_process
from jaxrl.common.errors import usage_errors


def require_own_process(activity: str) -> None:
    """Raise UsageError in a process that was forked from one in which JAX already ran."""
    with usage_errors():
        check_process(activity, "multiprocessing.get_context('spawn')")
