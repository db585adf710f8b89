"""The choices of dtypes, for settings; `jaxrl.nn.precision` says what they mean."""

from typing import Literal

Compute = Literal["auto", "float32", "bfloat16"]
Store = Literal["auto", "float32", "float16"]
