"""jaxrl: reinforcement learning with environment, replay buffer and learner on the accelerator."""

from typing import TYPE_CHECKING, Any

from jaxrl.common.version import __version__

if TYPE_CHECKING:
    from jaxrl.api import Evaluation, Result, evaluate, load, make_train, train
    from jaxrl.integrations.export.formats import export
    from jaxrl.runtime.policy import Policy


__all__ = ["Evaluation", "Policy", "Result", "__version__", "evaluate", "export", "load", "make_train", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:  # imported on first access, so that commands start quickly
        raise AttributeError(f"module 'jaxrl' has no attribute '{name}'")
    if name == "export":
        from jaxrl.integrations.export import formats

        return formats.export
    from jaxrl import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
