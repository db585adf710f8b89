"""The claims of claims.yaml: what is run, which figures are taken from it, and what they are expected to be."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envs_jax.base import closest
from jaxrl.common.errors import UsageError
from jaxrl.common.yaml_files import read_mapping

FILE = Path(__file__).with_name("claims.yaml")
TIERS = ("test", "nightly", "release", "gpu")
KINDS = {  # by the entry that holds the last command of a claim
    "evaluate": "pretrained",  # or "train", where there is something to train
    "measure": "ratio",
    "check": "parity",
}


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of a claim.

    Its path leads through the JSON of the claim's last command: names of entries between slashes, where name=value
    picks the entry of a list. It ends at a number, a curve (the last value counts) or an estimate (its mean).
    """

    name: str
    path: str
    expected: tuple[float, ...]  # that were measured before, of each seed or one for all; their mean is expected
    within: float | None = None  # tolerance of the mean over the claim's seeds; None: shown, not judged
    ci95: float | None = None  # half of the interval of `expected`, if it was recorded without its seeds

    @property
    def expectation(self) -> float:
        return statistics.fmean(self.expected)


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim, with an entry of its name in claims.yaml."""

    name: str
    about: str  # what is claimed, in half a sentence
    tier: str  # one of TIERS
    cost: float  # minutes of a seed: of a CPU core, in the tier gpu of a GPU
    kind: str  # "train" or one of KINDS
    train: tuple[str, ...]  # flags of jaxrl.train, one stage after another; {previous} is the run of the stage before
    trained_by: str  # the claim whose runs are used, often this one
    command: str  # module and flags; {run} is the run of the last stage
    seeds: tuple[int | None, ...]  # (None,) where nothing is trained
    figures: tuple[Figure, ...]
    needs: tuple[str, ...] = ()  # see `needs`
    curve: str = ""  # metric of the selection episodes whose course in training is kept

    @property
    def commands(self) -> list[str]:
        """The commands, as the result names them."""
        return [
            *(f"python -m jaxrl.train {flags} --seed {{seed}}" for flags in self.train),
            f"python -m {self.command}",
        ]


def read_claims(path: Path = FILE) -> dict[str, Claim]:
    """Read all claims by their names. Raises UsageError: the file is not as `Claim` says."""
    entries = read_mapping(path)
    claims: dict[str, Claim] = {}
    for name, entry in entries.items():
        try:
            claims[name] = _make_claim(name, entry, claims)
        except (TypeError, ValueError, KeyError) as error:
            raise UsageError(f"{path}: the claim '{name}' cannot be read: {error!r}") from None
    return claims


def _make_claim(name: str, entry: Mapping[str, Any], before: Mapping[str, Claim]) -> Claim:
    entry = dict(entry)
    if entry["tier"] not in TIERS:
        raise ValueError(f"the tier is one of {', '.join(TIERS)}, not {entry['tier']}")
    (key,) = [key for key in KINDS if key in entry]
    train = entry.pop("train", ())
    trained_by = name
    if isinstance(train, str):  # the name of a claim whose runs are used
        trained_by = before[train].trained_by
        train = before[train].train
    seeds = tuple(entry.pop("seeds", (None,)))
    if bool(train) != (seeds != (None,)):
        raise ValueError("seeds are of claims that train, and only of these")
    if "curve" in entry and not train:
        raise ValueError("a curve is of training, and nothing is trained")
    figures = tuple(_make_figure(*item) for item in entry.pop("expect", {}).items())
    if bool(figures) != (key != "check"):
        raise ValueError("'expect' names figures, unless the exit code is what is checked")
    if figures and all(figure.within is None for figure in figures):
        raise ValueError("no figure has a tolerance, so the claim would always hold")
    return Claim(
        name=name,
        kind="train" if train else KINDS[key],
        train=tuple(train),
        trained_by=trained_by,
        command=entry.pop(key),
        seeds=seeds,
        figures=figures,
        needs=tuple(entry.pop("needs", ())),
        **entry,
    )


def _make_figure(name: str, entry: Mapping[str, Any]) -> Figure:
    entry = dict(entry)
    expected = entry.pop("expected")
    path = entry.pop("of")
    return Figure(name, path, tuple(expected if isinstance(expected, list) else [expected]), **entry)


def choose(claims: Mapping[str, Claim], names: Sequence[str], tier: str | None) -> list[Claim]:
    """Return the claims of these names, or of a tier. Raises UsageError: there are none."""
    if bool(names) == (tier is not None):
        raise UsageError("name claims, or a --tier of them; --list shows both")
    for name in names:
        if name not in claims:
            raise UsageError(f"unknown claim '{name}': {closest(name, claims)}")
    return [claims[name] for name in names] or [claim for claim in claims.values() if claim.tier == tier]


def take(result: Any, path: str, run: str = "") -> float:
    """Return the figure of a path in a result, see `Figure`; `run` replaces {run}. Raises UsageError."""
    value = result
    try:
        for step in path.split("/"):
            value = _pick(value, step) if "=" in step else value[step.replace("{run}", run)]
        if isinstance(value, Mapping):
            value = value["mean"]
        return float(value[-1] if isinstance(value, list) else value)
    except (KeyError, IndexError, TypeError, ValueError):
        raise UsageError(f"the command's result has no figure '{path}': change the path in {FILE.name}") from None


def _pick(entries: Sequence[Mapping[str, Any]], step: str) -> Any:
    """Return the only entry of a list that has these values: "first=sampled,second=level2"."""
    required_values = [word.split("=") for word in step.split(",")]
    (entry,) = [one for one in entries if all(str(one[name]) == value for name, value in required_values)]
    return entry
