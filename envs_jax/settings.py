"""Settings, names and the sentences about them: all that a command line needs before JAX is imported."""

import dataclasses
import difflib
import importlib
from collections.abc import Collection
from typing import Any

Bounds = tuple[float, float]
LARGEST = 1e18  # bound of numbers that have none of their own


def setting(
    default: Any, text: str, flag: bool = True, between: Bounds | None = None, choices: Collection[str] = ()
) -> Any:
    """A dataclass field with a one-line explanation, the help of its command-line flag (if it is to have one).

    `between` are the smallest and the largest number that it may be, `choices` all words, see `check_settings`.
    """
    metadata = {"help": text, "flag": flag, "between": between, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def check_bounds(name: str, value: float | tuple[float, ...], between: Bounds | None) -> None:
    """Raise ValueError unless a number, or each of several, lies between the bounds."""
    low, high = between or (-LARGEST, LARGEST)
    numbers = value if isinstance(value, tuple) else (value,)
    if not all(low <= number <= high for number in numbers):
        raise ValueError(
            f"{name} must lie between {format_bound(low)} and {format_bound(high)}, not {short_repr(value)}"
        )


def format_bound(number: float) -> str:
    """Format a bound: whole numbers with commas, others in six digits."""
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def check_settings(instance: Any) -> None:
    """Raise ValueError unless all fields of a dataclass are within the bounds or choices of their `setting`."""
    for field in dataclasses.fields(instance):
        value, choices = getattr(instance, field.name), field.metadata.get("choices")
        if field.metadata.get("between"):
            check_bounds(field.name, value, field.metadata["between"])
        if choices and value not in choices:
            raise ValueError(f"unknown {field.name} {short_repr(value)}: {closest(str(value), choices)}")


def short_repr(value: Any, most: int = 80) -> str:
    """Return the `repr` of a user's value for error messages, cut to `most` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # of integers with thousands of digits, of deep lists
        text = f"a value too large to show of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 4]}...{text[-1]}"


registry: dict[str, str] = {}
ADAPTERS: dict[str, str] = {}  # {library: path of the class whose `of(name)` is the class of "library:Name"}


def register(name: str, path: str) -> None:
    """Make `make(name)` find the class at `path` ("module:Class"). Raises ValueError for a name in use."""
    if registry.get(name, path) != path:
        raise ValueError(f"environment name '{name}' is already registered for {registry[name]}")
    registry[name] = path


def registered() -> tuple[str, ...]:
    """Return the names of all registered environments."""
    return tuple(sorted(registry))


def closest(name: str, names: Any) -> str:
    """Return half a sentence that suggests the closest of `names`, or lists them all where they are few."""
    word, known = name[:MOST_COMPARED], sorted(names)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if near:
        return f"did you mean '{near[0]}'?"
    if len(listed := ", ".join(known)) <= _MOST_LISTED:
        return f"choose from: {listed}"
    return f"the closest of {len(known)} are {', '.join(difflib.get_close_matches(word, known, n=3, cutoff=0.0))}"


MOST_COMPARED, _MOST_LISTED = 100, 250  # characters


def load(path: str, what: str) -> type:
    """Import "module:Class". Raises ValueError where it does not exist."""
    module, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ValueError(f"{what} {short_repr(path)} is not a class: write module:Class, such as my_games:Corridor")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise  # the module exists, one of its imports does not
        raise ValueError(
            f"{what} {short_repr(path)}: there is no module {short_repr(module)} on the Python path"
        ) from None
    except AttributeError:
        raise ValueError(
            f"{what} {short_repr(path)}: module {short_repr(module)} has no {short_repr(attribute)}"
        ) from None


def decorated(cls: type) -> bool:
    """Return whether a class is a dataclass whose own settings are fields: without the decorator they stay `Field`s."""
    return dataclasses.is_dataclass(cls) and not any(isinstance(x, dataclasses.Field) for x in vars(cls).values())
