"""Settings, names and the sentences about them: all that a command line needs before JAX is imported."""

import contextlib
import dataclasses
import difflib
import importlib
import math
import re
import types
import typing
from collections.abc import Collection, Mapping
from decimal import Decimal
from numbers import Real
from typing import Any, Literal

from envs_jax.places import find_place

Bounds = tuple[float, float]
SMALLEST_IMAGE = 9  # pixels on a side that convolutions take; smaller images are flattened
LARGEST = 1e18  # bound of numbers that have none of their own


def setting(
    default: Any, text: str, flag: bool = True, between: Bounds | None = None, choices: Collection[str] = ()
) -> Any:
    """Return a dataclass field with a one-line explanation, which is the help of its command-line flag.

    `flag`: whether it has a flag. `between`: the smallest and the largest number allowed; `choices`: all words allowed;
    see `check_settings`.
    """
    metadata = {"help": text, "flag": flag, "between": between, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def with_default(cls: Any, name: str, default: Any) -> Any:
    """Return a setting of a dataclass with another default, for a subclass."""
    return dataclasses.field(default=default, metadata=cls.__dataclass_fields__[name].metadata)


def check_bounds(name: str, value: float | tuple[float, ...], between: Bounds | None) -> None:
    """Raise ValueError unless a number, or each of several, lies between the bounds."""
    low, high = between or (-LARGEST, LARGEST)
    numbers = value if isinstance(value, tuple) else (value,)
    if not all(low <= number <= high for number in numbers):
        typed = int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value
        raise ValueError(
            f"{name} must lie between {format_bound(low)} and {format_bound(high)}, not {short_repr(typed)}"
        )


def format_bound(number: float) -> str:
    """Format a bound: whole numbers with commas, others in six digits."""
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def check_settings(instance: Any) -> None:
    """Raise ValueError unless all fields of a dataclass are within the bounds or choices of their `setting`."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        choices = field.metadata.get("choices")
        between = field.metadata.get("between")
        if between or ("between" in field.metadata and isinstance(value, float)):  # not NaN, nor infinite
            check_bounds(field.name, value, between)
        if choices and value not in choices:
            raise ValueError(f"unknown {field.name} {short_repr(value)}: {closest(str(value), choices)}")


def exact_value(name: str, value: Any, kind: Any, between: Bounds | None = None, texts: bool = False) -> Any:
    """Return the value of a setting as the Python value of its kind, never truncated and never guessed.

    Args:
        name: the setting, for the message.
        value: a Python value, or a scalar of NumPy or JAX; a number of any type, if the kind holds it exactly (for
            float: up to the nearest one).
        kind: bool, int, float, str, a Literal, a tuple of these, or a union; a value of another kind is returned.
        between: the smallest and the largest number allowed; None = any, also infinite ones.
        texts: whether numbers may be text, as command lines give them, and YAML 1.1, to which 1e-3 is a word.

    Raises:
        ValueError: a word for a number, 2.5 for a whole number, a number for true or false, one out of bounds, ...
    """
    origin = typing.get_origin(kind)
    parts = typing.get_args(kind)
    if kind is None or kind is type(None):
        if value is None:
            return None
    elif origin in (typing.Union, types.UnionType):
        for part in parts:
            with contextlib.suppress(ValueError):
                exact_value(name, value, part, texts=texts)
                break
        else:
            raise _refuse(name, value, kind)
        return exact_value(name, value, part, between, texts)
    elif origin is Literal:
        scalar = _scalar(value)
        for option in parts:
            if type(scalar) is type(option) and scalar == option:
                return option
        raise ValueError(
            f"{name} is {short_repr(value)}: {closest(_as_word(value), [str(option) for option in parts])}"
        )
    elif origin is tuple:
        values = value.tolist() if getattr(value, "ndim", 0) == 1 else value
        if isinstance(values, list | tuple):
            kinds = parts[:1] * len(values) if parts[1:] == (Ellipsis,) else parts
            if len(kinds) == len(values):
                pairs = zip(values, kinds, strict=True)
                return tuple(exact_value(name, one, part, between, texts) for one, part in pairs)
    elif kind in (bool, str):
        scalar = _scalar(value)
        if isinstance(scalar, kind):
            return kind(scalar)
    elif kind in (int, float):
        number = _exact_number(_parse_number(value) if texts and isinstance(value, str) else _scalar(value), kind)
        if number is not None and (between is None or abs(number) < math.inf):
            if between is not None:
                check_bounds(name, number, between)
            return number
    else:
        return value
    raise _refuse(name, value, kind)


def _refuse(name: str, value: Any, kind: Any) -> ValueError:
    return ValueError(f"{name} must be {kind_name(kind)}, not {short_repr(value)}")


def _exact_number(number: Any, kind: Any) -> int | float | None:
    """Return a number as int or as the nearest float; None for anything else, and for 2.5 as int."""
    if not _is_number(number):
        return None
    if kind is float:
        return _nearest_float(number)
    # isfinite converts to float, which integers of hundreds of digits do not fit
    is_whole = isinstance(number, int) or (math.isfinite(number) and number == int(number))
    return int(number) if is_whole else None


def _is_number(value: Any) -> bool:
    return isinstance(value, Real | Decimal) and not isinstance(value, bool)


def _parse_number(text: str) -> int | float | None:
    """Return the finite number that a text is, None if it is none; Python would take 8_0 for 80."""
    if "_" in text and not re.fullmatch(r"[+-]?\d{1,3}(_\d{3})+(\.\d*)?", text):
        return None
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            number = convert(text)
            return number if abs(number) < math.inf else None
    return None


def _scalar(value: Any) -> Any:
    """Return the Python value of a scalar of NumPy or JAX; anything else as it is."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        try:
            return value.item()
        except TypeError:  # a value that is only known when the program runs
            return value
    return value


def _nearest_float(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf if number > 0 else -math.inf


def kind_name(kind: Any) -> str:
    """Return what a setting of a kind must be, in words."""
    origin = typing.get_origin(kind)
    parts = typing.get_args(kind)
    if origin is tuple:
        return "a list of numbers" if parts[1:] == (Ellipsis,) else f"a list of {len(parts)} numbers"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(kind_name(part) for part in parts)
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", type(None): "None"}
    return words.get(kind, str(kind))


def exact_settings(cls: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a dataclass by `exact_value` of its annotations. Raises ValueError."""
    kinds = kinds_of(cls)
    return {name: exact_value(name, value, kinds.get(name, Any)) for name, value in settings.items()}


def take_exactly(instance: Any) -> None:
    """Replace the fields of a frozen dataclass by their `exact_value`, in its `__post_init__`. Raises ValueError."""
    fields = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    for name, value in exact_settings(type(instance), fields).items():
        object.__setattr__(instance, name, value)


def kinds_of(cls: type) -> dict[str, Any]:
    """Return {setting: its annotation} of a dataclass."""
    try:
        return typing.get_type_hints(cls)
    except (NameError, TypeError, AttributeError):  # a name that is only known in a function, or to type checkers
        plain = {"bool": bool, "int": int, "float": float, "str": str}
        return {field.name: plain.get(str(field.type), field.type) for field in dataclasses.fields(cls)}


def short_repr(value: Any, most: int = 80) -> str:
    """Return the `repr` of a user's value for error messages, cut to `most` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer with thousands of digits, a deep list
        text = f"a value too large to show of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 4]}...{text[-1]}"


registry: dict[str, str] = {}
ADAPTERS: dict[str, str] = {}  # {library: path of the class whose `class_of(name)` is the class of "library:Name"}


def register(name: str, path: str) -> None:
    """Make `make(name)` find the class at `path` ("module:Class"). Raises ValueError for a name in use."""
    if registry.get(name, path) != path:
        raise ValueError(f"environment name '{name}' is already registered for {registry[name]}")
    registry[name] = path


def registered() -> tuple[str, ...]:
    """Return the names of all registered environments."""
    return tuple(sorted(registry))


def _as_word(value: Any) -> str:
    return value if isinstance(value, str) else short_repr(value)


def closest(name: str, names: Any) -> str:
    """Return half a sentence that suggests the closest of `names`, or lists them all where they are few."""
    word = name[:MOST_COMPARED]
    known = sorted(names)
    same = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if word.lower() in same or matches:
        return f"did you mean '{same.get(word.lower()) or matches[0]}'?"
    if len(listed := ", ".join(known)) <= _MOST_LISTED:
        return f"choose from: {listed}"
    return f"the closest of {len(known)} are {', '.join(difflib.get_close_matches(word, known, n=3, cutoff=0.0))}"


MOST_COMPARED = 100  # characters
_MOST_LISTED = 250  # characters


def load(path: str, what: str) -> type:
    """Import "module:Class". Raises ValueError where it does not exist."""
    module, _, attribute = path.partition(":")
    if "<locals>" in attribute:
        raise ValueError(
            f"{what} {short_repr(path)} is defined inside a function, where it cannot be found by its name: move the "
            "class to the top level of a module"
        )
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ValueError(f"{what} {short_repr(path)} is not a class: write module:Class, such as my_games:Corridor")
    loaded = load_module(module, what, path)
    try:
        return getattr(loaded, attribute)
    except AttributeError:
        classes = [x for x in vars(loaded).values() if isinstance(x, type) and x.__module__ == loaded.__name__]
        advice = f": {closest(attribute, [cls.__name__ for cls in classes])}" if classes else ""
        raise ValueError(
            f"{what} {short_repr(path)}: module {short_repr(module)} has no {short_repr(attribute)}{advice}"
        ) from None


def load_module(module: str, what: str, path: str = "") -> types.ModuleType:
    """Import the module of `path`, which `what` names. Raises ValueError where it does not exist or fails."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise _failed_import(error, what, path or module) from error  # the module exists, one of its imports not
        raise ValueError(
            f"{what} {short_repr(path or module)}: there is no module {short_repr(module)} on the Python path: go to "
            "the folder that holds it, or name this folder in PYTHONPATH"
        ) from None
    except SystemExit as error:
        raise ValueError(
            f"{what} {short_repr(path or module)}: importing its module ends the program (SystemExit: {error}): put "
            "what only a script should do under if __name__ == '__main__'"
        ) from None
    except Exception as error:
        raise _failed_import(error, what, path or module) from error


def _failed_import(error: Exception, what: str, path: str) -> ValueError:
    reason = error.msg if isinstance(error, SyntaxError) else str(error)
    place = find_place(error) or "its module"
    return ValueError(f"{what} {short_repr(path)} cannot be imported: {place}: {type(error).__name__}: {reason}")


def is_decorated(cls: type) -> bool:
    """Return whether a class is a dataclass whose own settings are fields: without the decorator they stay `Field`s."""
    return dataclasses.is_dataclass(cls) and not any(isinstance(x, dataclasses.Field) for x in vars(cls).values())
