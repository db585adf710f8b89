"""Algorithms by name. A file's docstring has its equations and the order of its parts."""

from typing import TYPE_CHECKING

from envs_jax.settings import closest, is_decorated, load, short_repr

if TYPE_CHECKING:
    from jaxrl.algos.base import Algorithm

ALGORITHMS = {
    "coma": "jaxrl.algos.coma:Coma",
    "coma_original": "jaxrl.algos.coma_original:ComaOriginal",
    "ddpg": "jaxrl.algos.ddpg:Ddpg",
    "bicnet": "jaxrl.algos.ddpg:Bicnet",
    "sac": "jaxrl.algos.sac:Sac",
    "ppo": "jaxrl.algos.ppo:Ppo",
    "collective": "jaxrl.algos.collective.algorithm:Collective",
    "student": "jaxrl.algos.student:Student",
}


def find(name: str) -> "type[Algorithm]":
    """Return the class of a registered algorithm or of a user's "module:Class". Raises ValueError if there is none."""
    if ":" not in name and name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {short_repr(name)}: {closest(name, ALGORITHMS)}")
    from jaxrl.algos.base import Algorithm  # with JAX, which --help does without

    cls = load(ALGORITHMS.get(name, name), "algorithm")
    if not (isinstance(cls, type) and issubclass(cls, Algorithm) and is_decorated(cls)):
        raise ValueError(
            f"algorithm {short_repr(name)} must be a frozen dataclass that subclasses jaxrl.algos.base.Algorithm"
        )
    return cls


def find_ancestors(name: str) -> list[str]:
    """Return the registered algorithms that a user's "module:Class" extends, the closest first. Raises ValueError."""
    names = {path: registered for registered, path in ALGORITHMS.items()}
    paths = [f"{cls.__module__}:{cls.__qualname__}" for cls in find(name).__mro__]
    return [names[path] for path in paths if path in names]
