"""Networks. Parameters are float32; matmuls and convolutions run in the dtype of the layout."""

from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from envs_jax.base import Array

Initialiser = Callable[..., Array]


def torch_uniform(fan_in: int) -> Initialiser:
    """Uniform in +/- 1 / sqrt(fan-in), PyTorch's default for weights and biases alike."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        bound = fan_in**-0.5
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def he_normal(fan_in: int) -> Initialiser:
    """Normal with variance 2 / fan-in (He et al. 2015, equation 10)."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jax.random.normal(key, shape, dtype) * (2.0 / fan_in) ** 0.5

    return init


def convolve(x: Array, kernel: Array, method: Literal["conv", "rows", "dense"]) -> Array:
    """Valid convolution with stride 1, channels last.

    Args:
        x: [N, H, W, C].
        kernel: [h, w, C, F], in the dtype of `x`.
        method: "conv" calls the convolution of the back end (right on GPUs). On CPUs matrix products are many
            times faster: "rows" gathers the w neighbours of a row into one matrix product per kernel row;
            "dense" multiplies each band of h rows by the kernel written as one banded matrix (best for few
            channels, where the wasted zeros cost less than the small products).

    Returns:
        [N, H - h + 1, W - w + 1, F].
    """
    height, width = x.shape[1] - kernel.shape[0] + 1, x.shape[2] - kernel.shape[1] + 1
    h, w, channels, features = kernel.shape
    if method == "conv":
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    if method == "rows":
        patches = jnp.concatenate([x[:, :, k : k + width] for k in range(w)], axis=-1)  # [N, H, width, w C]
        rows = [patches[:, k : k + height] @ kernel[k].reshape(w * channels, features) for k in range(h)]
        return sum(rows[1:], rows[0])
    shifted = jnp.stack(  # [W, width, h, C, F]: the kernel slid along the row
        [jnp.pad(kernel, ((0, 0), (k, width - 1 - k), (0, 0), (0, 0))) for k in range(width)], axis=0
    )  # [width, h, W, C, F]
    matrix = shifted.transpose(1, 2, 3, 0, 4).reshape(h * x.shape[2] * channels, width * features)
    bands = jnp.stack([x[:, k : k + h].reshape(x.shape[0], -1) for k in range(height)], axis=1)
    return (bands @ matrix).reshape(x.shape[0], height, width, features)


def convolution_method(width: int, platform: str) -> Literal["conv", "rows", "dense"]:
    """What is fastest on a platform at a network width (measured by `python -m bench.convolution`)."""
    if platform != "cpu":
        return "conv"
    return "dense" if width <= 64 else "rows"


class ConvStack(nn.Module):
    """Three convolutions and a dense head, as in Westheider et al. 2023: 5 x 5, 4 x 4, then the whole rest.

    An 11 x 11 x C input becomes 7 x 7, 4 x 4, then 1 x 1 by `width` channels, `depth` dense layers, `outputs`.
    Smaller or larger images fit as long as 2 x 2 pixels are left for the last convolution (side 9 or more).
    """

    outputs: int
    width: int
    depth: int = 1
    initialiser: Literal["torch", "he"] = "torch"
    method: Literal["conv", "rows", "dense"] = "conv"
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[N, H, W, C] -> float32[N, outputs]."""
        x = x.astype(self.dtype)
        for layer, size in enumerate((5, 4, 0)):
            h, w = (size, size) if size else x.shape[1:3]
            shape = (h, w, x.shape[3], self.width)
            kernel, bias = self._parameters(f"conv{layer + 1}", shape, h * w * x.shape[3])
            method = "rows" if (h, w) == x.shape[1:3] and self.method != "conv" else self.method
            x = nn.relu(convolve(x, kernel, method) + bias[None, None, None])
        return _Head(self.outputs, self.width, self.depth, self.initialiser, self.dtype, name="head")(
            x.reshape(x.shape[0], -1)
        )

    def _parameters(self, name: str, shape: tuple[int, ...], fan_in: int) -> tuple[Array, Array]:
        return _parameters(self, name, shape, fan_in, self.initialiser)


class _Head(nn.Module):
    """`depth` hidden dense layers of `width` and a linear layer to `outputs`."""

    outputs: int
    width: int
    depth: int
    initialiser: str
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for layer in range(self.depth):
            kernel, bias = _parameters(self, f"fc{layer + 1}", (x.shape[-1], self.width), x.shape[-1], self.initialiser)
            x = nn.relu(x @ kernel + bias[None])
        kernel, bias = _parameters(self, "out", (x.shape[-1], self.outputs), x.shape[-1], self.initialiser, last=True)
        return (x @ kernel + bias[None]).astype(jnp.float32)


def activation_bytes(net: nn.Module, shape: tuple[int, ...]) -> int:
    """About what one sample of `shape` needs while a gradient is computed: every layer's input as the matrix
    product sees it (patches or bands), kept for the backward pass and once more as its gradient.
    """
    width, depth = net.width, net.depth
    values = 0
    if isinstance(net, ConvStack):
        height, side, channels = shape
        for size in (5, 4):
            height, side = height - size + 1, side - size + 1
            widened = {"conv": size, "rows": side * size, "dense": (side + size - 1) * size}[net.method]
            values += height * widened * channels + height * side * width
            channels = width
        values += height * side * channels
    else:
        values += sum(shape)
    return 4 * 2 * (values + (depth + 2) * width)


class MLP(nn.Module):
    """Dense layers for vector observations."""

    outputs: int
    width: int
    depth: int = 2
    initialiser: Literal["torch", "he"] = "torch"
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[N, D] -> float32[N, outputs]."""
        head = _Head(self.outputs, self.width, self.depth, self.initialiser, self.dtype, name="head")
        return head(x.astype(self.dtype).reshape(x.shape[0], -1))


def _parameters(
    module: nn.Module, name: str, shape: tuple[int, ...], fan_in: int, initialiser: str, last: bool = False
) -> tuple[Array, Array]:
    """Kernel and bias of a layer, in the module's compute dtype.

    "torch": both uniform in +/- 1 / sqrt(fan-in). "he": He normal kernels and zero biases, last layer 100 times
    smaller, so that a policy starts uniform and a critic near 0.
    """
    if initialiser == "torch":
        kernel_init = bias_init = torch_uniform(fan_in)
    else:
        scale = 0.01 if last else 1.0
        kernel_init = lambda *args: scale * he_normal(fan_in)(*args)  # noqa: E731
        bias_init = nn.initializers.zeros
    kernel = module.param(f"{name}_kernel", kernel_init, shape, jnp.float32)
    bias = module.param(f"{name}_bias", bias_init, shape[-1:], jnp.float32)
    dtype = module.dtype
    return kernel.astype(dtype), bias.astype(dtype)
