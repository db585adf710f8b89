"""Command lines: settings, flags and presets."""

import sys

try:
    import jax as jax
except ValueError as error:  # JAX reads its variables, such as JAX_NUM_CPU_DEVICES, when it is imported
    print(f"error: {error}: correct the variable of that name, or unset it", file=sys.stderr)
    raise SystemExit(2) from None
