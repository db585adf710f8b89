"""Valid convolutions, channels last, by the method that is fastest on a platform."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from envs_jax.base import Array

Convolution = Literal["conv", "dense", "patches"]


def convolve(x: Array, kernel: Array, method: Convolution, stride: int = 1) -> Array:
    """Valid convolution, channels last.

    Args:
        x: [N, H, W, C].
        kernel: [h, w, C, F], in the dtype of `x`.
        method: "conv" calls the convolution of the backend (best on GPUs). On CPUs, where that is slow inside
            compiled loops, matrix products are many times faster: "dense" multiplies each band of h rows by the
            kernel written as one banded matrix (best for few channels, where the wasted zeros cost less than small
            products); "patches" gathers the pixels under the kernel and wastes nothing.
        stride: pixels between neighbouring outputs, along both axes.

    Returns:
        [N, (H - h) // stride + 1, (W - w) // stride + 1, F].
    """
    h, w, channels, features = kernel.shape
    height, width = _outputs(x.shape[1], h, stride), _outputs(x.shape[2], w, stride)
    if x.shape[1:3] == (h, w):  # a single product
        product = x.reshape(x.shape[0], -1) @ kernel.reshape(-1, features)
        return product.reshape(x.shape[0], 1, 1, features)
    if method == "conv":
        strides = stride, stride
        return jax.lax.conv_general_dilated(x, kernel, strides, "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    if method == "patches":
        return _convolve_patches(x.transpose(1, 2, 0, 3), kernel, stride).transpose(2, 0, 1, 3)
    rest = x.shape[2] - w
    shifted = jnp.stack(  # [width, h, W, C, F]: the kernel slid along the row
        [jnp.pad(kernel, ((0, 0), (k * stride, rest - k * stride), (0, 0), (0, 0))) for k in range(width)], axis=0
    )
    matrix = shifted.transpose(1, 2, 3, 0, 4).reshape(h * x.shape[2] * channels, width * features)
    bands = jnp.stack([x[:, k * stride : k * stride + h].reshape(x.shape[0], -1) for k in range(height)], axis=1)
    return (bands @ matrix).reshape(x.shape[0], height, width, features)


def _outputs(inputs: int, taps: int, stride: int) -> int:
    """Return the number of outputs of a valid convolution along one axis."""
    return (inputs - taps) // stride + 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _convolve_patches(x: Array, kernel: Array, stride: int) -> Array:
    """`convolve` of x [H, W, N, C] into [H', W', N, F].

    With the pixels first, the pixels under one kernel entry are a few contiguous blocks of memory. The gradient of x is
    accumulated entry by entry in place; automatic differentiation would build a gradient of all patches.
    """
    h, w, channels, features = kernel.shape
    return _patches(x, h, w, stride) @ kernel.reshape(h * w * channels, features)


def _under(i: int, j: int, height: int, width: int, stride: int) -> tuple[slice, slice]:
    """Return which pixels are under entry (i, j) of a kernel with height x width outputs."""
    return slice(i, i + (height - 1) * stride + 1, stride), slice(j, j + (width - 1) * stride + 1, stride)


def _patches(x: Array, h: int, w: int, stride: int) -> Array:
    """[H, W, N, C] -> [H', W', N, h w C]; columns first, then rows: h + w slices to compile instead of h w."""
    columns = jnp.concatenate([_taps(x, j, w, stride, axis=1) for j in range(w)], axis=-1)
    return jnp.concatenate([_taps(columns, i, h, stride, axis=0) for i in range(h)], axis=-1)


def _taps(x: Array, first: int, taps: int, stride: int, axis: int) -> Array:
    """Return the pixels under one entry of a kernel with this many `taps` along an axis."""
    last = first + (_outputs(x.shape[axis], taps, stride) - 1) * stride
    return jax.lax.slice_in_dim(x, first, last + 1, stride, axis)


def _patches_forward(x: Array, kernel: Array, stride: int) -> tuple[Array, tuple[Array, Array]]:
    return _convolve_patches(x, kernel, stride), (x, kernel)


def _patches_backward(stride: int, residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    h, w, channels, features = kernel.shape
    height, width, samples, _ = gradient.shape
    rows = gradient.reshape(-1, features)
    kernel_gradient = _patches(x, h, w, stride).reshape(-1, h * w * channels).T @ rows
    x_gradient = jnp.zeros_like(x)
    for i in range(h):
        for j in range(w):
            block = (rows @ kernel[i, j].T).reshape(height, width, samples, channels)
            x_gradient = x_gradient.at[_under(i, j, height, width, stride)].add(block)
    return x_gradient, kernel_gradient.reshape(kernel.shape)


_convolve_patches.defvjp(_patches_forward, _patches_backward)
