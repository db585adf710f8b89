"""Values of flags that are no settings."""

from envs_jax.base import short_repr
from jaxrl.common.errors import UsageError


def parse_int(text: str, flag: str, low: int, high: int) -> int:
    """Parse a whole number from the command line. Raises UsageError."""
    try:
        number = int(text)
    except ValueError:
        raise UsageError(f"{flag} must be a whole number, not {short_repr(text)}") from None
    if not low <= number <= high:
        bounds = f"lie between {low} and {high:,}" if low < high else f"be {low} here"
        raise UsageError(f"{flag} must {bounds}, not {short_repr(number)}")
    return number


def parse_list(text: str) -> list[str]:
    """Split comma-separated words, dropping duplicates."""
    return list(dict.fromkeys(text.replace(",", " ").split()))
