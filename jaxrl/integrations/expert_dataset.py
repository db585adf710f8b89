"""Expert datasets: recorded steps labelled with the action distribution of each task's expert, as files.

An expert dataset is one .npz file (NumPy's archive of arrays). Any program that can play an environment may write one.
Each of N rows is a step. The rows of an episode are contiguous and in order. There are K tasks, D numbers in an
observation and n in an action.

| array            | type, shape   | meaning |
|------------------|---------------|---------|
| version          | int[]         | 1 |
| environment      | str[]         | name of the environment, for information only |
| task_names       | str[K]        | |
| task             | int[N]        | index into task_names, one for all rows of an episode |
| step             | int[N]        | steps of the episode before this one: 0, 1, 2, ...; 0 begins an episode |
| observation      | float[N, D]   | observation before the action |
| action           | float[N, n]   | action taken, in [-1, 1] |
| reward           | float[N]      | reward of that action |
| next_observation | float[N, D]   | the next row's observation, or the episode's true last one |
| terminated       | bool[N]       | the episode terminated (it was not truncated) |
| mu               | float[N, n]   | tanh of the mean of the expert's Gaussian at `observation`, in [-1, 1] |
| log_std          | float[N, n]   | its log standard deviation before tanh |
| value            | float[N]      | the expert's Q(observation, action) |
"""

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np

from envs_jax.base import short_repr
from jaxrl.common.errors import UserError
from jaxrl.common.files import write_atomically

VERSION = 1
MIN_EPISODES = 5  # for each task, so that some can be held out
_ROWS = {  # type and number of axes of the arrays with a row for each step
    "observation": ("float", 2), "action": ("float", 2), "reward": ("float", 1), "next_observation": ("float", 2),
    "mu": ("float", 2), "log_std": ("float", 2), "value": ("float", 1), "task": ("int", 1), "step": ("int", 1),
    "terminated": ("bool", 1),
}  # fmt: skip
_TYPES = {"float": ("f", np.float32), "int": ("iu", np.int32), "bool": ("b", np.bool_)}  # in files, in memory
_NAMES = ("version", "environment", "task_names", *_ROWS)
_MAX_LOG_STD = 50  # its square and its exponential are still finite in float32
_SAME_SIZE = (("observation", "next_observation"), ("action", "mu"), ("action", "log_std"))


class ExpertDatasetError(UserError):
    """A file is not an expert dataset, or not one that can be used."""


@dataclasses.dataclass(frozen=True)
class ExpertDataset:
    """N labelled steps in NumPy arrays; see the module's table. Floats are float32, integers int32."""

    environment: str
    task_names: tuple[str, ...]
    task: np.ndarray
    step: np.ndarray
    observation: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    next_observation: np.ndarray
    terminated: np.ndarray
    mu: np.ndarray
    log_std: np.ndarray
    value: np.ndarray

    def __len__(self) -> int:
        return len(self.step)

    @property
    def episodes(self) -> np.ndarray:
        """Number of episodes of each task, int64[K]."""
        return np.bincount(self.task[self.step == 0], minlength=len(self.task_names))


def write(path: Path | str, dataset: ExpertDataset) -> None:
    """Write a dataset, all or nothing. Raises ExpertDatasetError if it is invalid, or the file cannot be written."""
    arrays = dataclasses.asdict(dataset) | {"version": np.int32(VERSION), "task_names": np.array(dataset.task_names)}
    _check(arrays, str(path), min_episodes=0)
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    try:
        write_atomically(Path(path), content.getvalue())
    except OSError as error:
        raise ExpertDatasetError(
            f"the expert dataset {path} cannot be written ({error.strerror}): choose an existing folder with free space"
        ) from None


def read(path: Path | str, min_episodes: int = MIN_EPISODES) -> ExpertDataset:
    """Read and check a dataset, with a minimum of episodes for every task.

    Raises ExpertDatasetError: no such file, not a dataset, missing arrays, wrong shapes, numbers that are not finite,
    steps out of order, too few episodes.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays: dict[str, Any] = {name: archive[name] for name in _NAMES if name in archive}
    except Exception as error:  # a damaged archive can raise anything
        reason = getattr(error, "strerror", None) or "it is not an .npz archive of plain arrays"
        raise ExpertDatasetError(
            f"the expert dataset {path} cannot be read ({reason}): name a file that jaxrl.collect wrote, or create it "
            f"again"
        ) from None
    _check(arrays, str(path), min_episodes)
    del arrays["version"]
    arrays |= {name: arrays[name].astype(_TYPES[kind][1]) for name, (kind, _) in _ROWS.items()}
    names = tuple(str(name) for name in arrays["task_names"])
    return ExpertDataset(**arrays | {"environment": str(arrays["environment"]), "task_names": names})


def read_all(paths: list[str]) -> ExpertDataset:
    """Concatenate several datasets, merging tasks of one name.

    Raises ExpertDatasetError: as `read`, or observations or actions of different sizes.
    """
    sets = [read(path) for path in paths]
    names = tuple(dict.fromkeys(name for one in sets for name in one.task_names))
    for path, one in zip(paths, sets, strict=True):
        for field, what in (("observation", "observations"), ("action", "actions")):
            sizes = getattr(sets[0], field).shape[1], getattr(one, field).shape[1]
            if sizes[0] != sizes[1]:
                raise ExpertDatasetError(
                    f"{what} of {paths[0]} have {sizes[0]} numbers, but {sizes[1]} in {path}: "
                    "use datasets of one arm and one kind of observation"
                )
    task = np.concatenate([np.array([names.index(name) for name in one.task_names])[one.task] for one in sets])
    fields = {name: np.concatenate([getattr(one, name) for one in sets]) for name in _ROWS if name != "task"}
    return ExpertDataset(environment=sets[0].environment, task_names=names, task=task.astype(np.int32), **fields)


def _check(arrays: dict[str, Any], path: str, min_episodes: int) -> None:
    def refuse(sentence: str) -> ExpertDatasetError:
        return ExpertDatasetError(f"the expert dataset {path} {sentence}")

    missing = [name for name in _NAMES if name not in arrays]
    if missing:
        raise refuse(f"lacks {', '.join(missing)}: see jaxrl/integrations/expert_dataset.py for what it must hold")
    if np.shape(arrays["version"]) or arrays["version"] != VERSION:
        raise refuse(
            f"is of version {short_repr(arrays['version'].tolist())}, this program reads version {VERSION}: create "
            f"it again"
        )
    rows = len(np.atleast_1d(arrays["step"]))
    if not rows:
        raise refuse("holds no steps: collect some")
    if np.ndim(arrays["task_names"]) != 1 or np.asarray(arrays["task_names"]).dtype.kind != "U":
        raise refuse("has task_names that are not str[K]: give a name for each task")
    names = [str(name) for name in arrays["task_names"]]
    if len({*names, ""}) <= len(names):
        raise refuse(f"has the tasks {short_repr(names)}: give each a different, non-empty name")
    for name, (kind, axes) in _ROWS.items():
        array = np.asarray(arrays[name])
        if array.ndim != axes or len(array) != rows or array.dtype.kind not in _TYPES[kind][0]:
            what = kind + ("[N]" if axes == 1 else "[N, numbers]")
            raise refuse(
                f"holds {name} as {array.dtype}{short_repr(list(array.shape))} for {rows} rows of step, not as {what}"
            )
        with np.errstate(over="ignore"):
            finite = array.dtype.kind != "f" or np.isfinite(array.astype(np.float32)).reshape(rows, -1).all(1)
        if not np.all(finite):
            row = int(np.argmin(finite))
            raise refuse(f"has a {name} that is not finite in row {row}: leave that episode out")
    for first, second in _SAME_SIZE:
        sizes = arrays[first].shape[1], arrays[second].shape[1]
        if not sizes[0]:
            raise refuse(f"has an empty {first}: give observations and actions")
        if sizes[0] != sizes[1]:
            raise refuse(
                f"mixes sizes: {first} has {sizes[0]} numbers, {second} has {sizes[1]}: give both the same size"
            )
    for name in ("action", "mu"):
        if np.abs(arrays[name]).max() > 1 + 1e-6:
            raise refuse(f"has values of {name} outside [-1, 1]: scale actions to that box")
    if np.abs(arrays["log_std"]).max() > _MAX_LOG_STD:
        raise refuse(f"has values of log_std outside ±{_MAX_LOG_STD}: give the logarithm of the standard deviation")
    _check_episodes(arrays, refuse, min_episodes)


def _check_episodes(arrays: dict[str, Any], refuse: Any, min_episodes: int) -> None:
    step = arrays["step"]
    task = arrays["task"]
    names = arrays["task_names"]
    if len(task) and not 0 <= task.min() <= task.max() < len(names):
        raise refuse(
            f"names {len(names)} tasks, but has rows of task {task.max() if task.min() >= 0 else task.min()}: number "
            "the tasks from 0"
        )
    begins = step == 0
    goes_on = (step[1:] == step[:-1] + 1) & (task[1:] == task[:-1]) & ~arrays["terminated"][:-1]
    wrong = ~(begins[1:] | goes_on)
    if len(step) and (not begins[0] or wrong.any()):
        row = int(np.argmax(wrong)) + 1 if begins[0] else 0
        raise refuse(f"breaks an episode at row {row}: rows of one episode must follow one another, steps from 0 on")
    inside = goes_on & ~begins[1:]
    same = np.isclose(arrays["next_observation"][:-1], arrays["observation"][1:], rtol=1e-4, atol=1e-4).all(1)
    if (inside & ~same).any():
        row = int(np.argmax(inside & ~same))
        raise refuse(
            f"has a next_observation in row {row} that is not the observation of row {row + 1}: make them equal"
        )
    for name, episodes in zip(names, np.bincount(task[begins].astype(np.int64), minlength=len(names)), strict=True):
        if episodes < min_episodes:
            raise refuse(
                f"has too few episodes of the task {short_repr(str(name))} to hold some out: {episodes}; collect "
                f"{min_episodes}"
            )
