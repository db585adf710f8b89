"""Command lines: settings, flags and presets."""

import gc
import sys

_collects = gc.isenabled()
gc.disable()  # importing makes hardly any garbage, and looking for it takes a tenth of the time
try:
    import jax as jax
except ValueError as error:  # JAX reads its variables, such as JAX_NUM_CPU_DEVICES, when it is imported
    print(f"error: {error}: correct the variable of that name, or unset it", file=sys.stderr)
    raise SystemExit(2) from None
finally:
    if _collects:
        gc.enable()
