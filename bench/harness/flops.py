"""Floating-point operations of a function, counted from the shapes of its matrix products and convolutions.

Two operations per multiply-add. Elementwise work is not counted, nor are products with zeros from padding and dilation
(frequent in gradients of convolutions): the count is the necessary work, independent of the implementation. Loops count
as often as they run; of branches the most expensive counts."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


def count(function: Callable[..., Any], *arguments: Any) -> float:
    """Count the FLOP of `function` on arrays or ShapeDtypeStructs, without running it.

    Raises ValueError: the function holds a loop whose length depends on data.
    """
    return _jaxpr_flops(jax.make_jaxpr(function)(*arguments).jaxpr)


def _jaxpr_flops(jaxpr: core.Jaxpr) -> float:
    return math.fsum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: Any) -> float:
    name = equation.primitive.name
    params = equation.params
    if name == "dot_general":
        return _dot(equation)
    if name == "conv_general_dilated":
        return _convolution(equation)
    inner = [_jaxpr_flops(jaxpr) for jaxpr in _inner(params)]
    if name == "cond":
        return max(inner)
    if name == "while" and any(inner):
        raise ValueError("a loop with products runs until data say so: its operations cannot be counted")
    times = params["length"] if name == "scan" else params["mesh"].size if name == "shard_map" else 1
    return times * math.fsum(inner)


def _inner(params: dict[str, Any]) -> list[core.Jaxpr]:
    """Return the jaxprs within an equation."""
    jaxprs = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                jaxprs.append(item.jaxpr)
            elif isinstance(item, core.Jaxpr):
                jaxprs.append(item)
    return jaxprs


def _dot(equation: Any) -> float:
    contracting = equation.params["dimension_numbers"][0][0]
    left = equation.invars[0].aval.shape
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracting)


def _convolution(equation: Any) -> float:
    params = equation.params
    numbers = equation.params["dimension_numbers"]
    image, kernel = (var.aval.shape for var in equation.invars)
    out = equation.outvars[0].aval.shape
    pairs = 1.0
    for axis, padding in enumerate(params["padding"]):
        pairs *= _pairs(
            inputs=image[numbers.lhs_spec[2 + axis]],
            taps=kernel[numbers.rhs_spec[2 + axis]],
            outputs=out[numbers.out_spec[2 + axis]],
            stride=params["window_strides"][axis],
            low=padding[0],
            spread=params["lhs_dilation"][axis],
            dilation=params["rhs_dilation"][axis],
        )
    batch = out[numbers.out_spec[0]]
    features = out[numbers.out_spec[1]]
    channels = kernel[numbers.rhs_spec[1]]  # in one group
    return 2.0 * batch * features * channels * pairs / params["batch_group_count"]


def _pairs(*, inputs: int, taps: int, outputs: int, stride: int, low: int, spread: int, dilation: int) -> int:
    """Count the pairs (output, tap) along one axis that meet an input: not padding, not a hole of dilation."""
    pairs = 0
    for output in range(outputs):
        for tap in range(taps):
            place = output * stride + tap * dilation - low
            pairs += place >= 0 and place % spread == 0 and place // spread < inputs
    return pairs
