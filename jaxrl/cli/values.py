"""Values of flags that are no settings."""

from envs_jax.base import shown
from jaxrl.common.errors import UsageError


def whole(text: str, flag: str, low: int, high: int) -> int:
    """Parse a whole number from the command line. Raises UsageError."""
    try:
        number = int(text)
    except ValueError:
        raise UsageError(f"{flag} must be a whole number, not {shown(text)}") from None
    if not low <= number <= high:
        bounds = f"lie between {low} and {high:,}" if low < high else f"be {low} here"
        raise UsageError(f"{flag} must {bounds}, not {shown(number)}")
    return number


def several(text: str) -> list[str]:
    """Split comma-separated words, dropping duplicates."""
    return list(dict.fromkeys(text.replace(",", " ").split()))
