"""Networks. Parameters are float32; matmuls and convolutions run in the compute dtype."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from envs_jax.base import Array
from jaxrl.common.types import Key, Params
from jaxrl.nn.convolutions import Convolution, convolve

Initialiser = Callable[..., Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A flax module and what it is called with, or an ensemble of such modules."""

    module: Any  # the flax module
    inputs: tuple[tuple[int, ...], ...]  # shapes of a call's arguments, with a batch axis
    # C modules with parameters of their own, leaves [C, ...], outputs [C, ...]; 0 = one without that axis
    members: int = 0

    def init(self, key: Key) -> Params:
        inputs = [jnp.zeros(shape, jnp.float32) for shape in self.inputs]
        if self.members:
            return jax.vmap(lambda k: self.module.init(k, *inputs))(jax.random.split(key, self.members))
        return self.module.init(key, *inputs)

    def apply(self, params: Params, *inputs: Array) -> Array:
        out: Array
        if self.members > 1:
            out = jax.vmap(lambda member: self.module.apply(member, *inputs))(params)
        elif self.members == 1:
            out = self.module.apply(jax.tree.map(lambda leaf: leaf[0], params), *inputs)[None]
        else:
            out = self.module.apply(params, *inputs)
        return out

    @functools.cached_property
    def shapes(self) -> Params:
        """The parameters as ShapeDtypeStructs."""
        return jax.eval_shape(self.init, jax.random.key(0))


def torch_uniform(fan_in: int) -> Initialiser:
    """Uniform in +/- 1 / sqrt(fan-in), PyTorch's default for weights and biases."""

    def init(key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        bound = fan_in**-0.5
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def he_normal(fan_in: int, scale: float = 1.0) -> Initialiser:
    """`scale` times a normal with variance 2 / fan-in (He et al. 2015, equation 10)."""

    def init(key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return scale * (jax.random.normal(key, shape, dtype) * (2.0 / fan_in) ** 0.5)

    return init


Initialisation = Literal["torch", "he", "xavier", "orthogonal"]


def convolution_methods(hidden_size: int, platform: str) -> tuple[Convolution, Convolution, Convolution]:
    """Return the fastest method for each layer of `ConvStack` on a platform."""
    if platform != "cpu":
        return ("conv", "conv", "conv")
    return ("patches", "dense" if hidden_size <= 64 else "patches", "patches")


class ConvStack(nn.Module):
    """Three convolutions and a dense head, as in Westheider et al. 2023: 5 x 5, 4 x 4, then the remaining image.

    An 11 x 11 x C input becomes 7 x 7, 4 x 4, then 1 x 1 by `hidden_size` channels, `depth` dense layers, `outputs`.
    With a first convolution of `stride` 2 it becomes 4 x 4, then 1 x 1, and the last convolution is one more dense
    layer. Other images fit if a pixel is left for the last convolution.
    """

    outputs: int
    hidden_size: int
    depth: int = 1
    initializer: Initialisation = "torch"
    methods: tuple[Convolution, Convolution, Convolution] = ("conv", "conv", "conv")
    dtype: Any = jnp.float32
    stride: int = 1

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[N, H, W, C] -> float32[N, outputs]."""
        x = x.astype(self.dtype)
        for layer, (size, method) in enumerate(zip((5, 4, 0), self.methods, strict=True)):
            h, w = (size, size) if size else x.shape[1:3]
            shape = (h, w, x.shape[3], self.hidden_size)
            kernel, bias = _parameters(self, f"conv{layer + 1}", shape, h * w * x.shape[3], self.initializer)
            x = _rectify(convolve(x, kernel, method, 1 if layer else self.stride), bias)
        head = _Head(self.outputs, self.hidden_size, self.depth, self.initializer, self.dtype, name="head")
        return head(x.reshape(x.shape[0], -1))


class _Head(nn.Module):
    """`depth` hidden dense layers of `hidden_size` and a linear layer to `outputs`, none if these are 0."""

    outputs: int
    hidden_size: int
    depth: int
    initializer: str
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for layer in range(self.depth):
            shape = x.shape[-1], self.hidden_size
            kernel, bias = _parameters(self, f"fc{layer + 1}", shape, x.shape[-1], self.initializer)
            x = _rectify(x @ kernel, bias)
        if not self.outputs:
            return x
        kernel, bias = _parameters(self, "out", (x.shape[-1], self.outputs), x.shape[-1], self.initializer, last=True)
        return (x @ kernel).astype(jnp.float32) + bias[None]


class MLP(nn.Module):
    """Dense layers for vector observations."""

    outputs: int
    hidden_size: int
    depth: int = 2
    initializer: Initialisation = "torch"
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[N, D] -> float32[N, outputs]."""
        head = _Head(self.outputs, self.hidden_size, self.depth, self.initializer, self.dtype, name="head")
        return head(x.astype(self.dtype).reshape(x.shape[0], -1))


class GaussianOutputs(nn.Module):
    """A network of n means, and after them n logarithms of deviations that are parameters, whatever the input."""

    means: nn.Module  # the network, [N, ...] -> float32[N, n]
    size: int  # n
    initial_std: float  # the deviations at the start

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[N, ...] -> float32[N, 2 n]."""
        mean = self.means(x)
        log_std = self.param("log_std", nn.initializers.constant(math.log(self.initial_std)), (self.size,), jnp.float32)
        return jnp.concatenate([mean, jnp.broadcast_to(log_std[None], mean.shape)], axis=-1)


def orthogonal(scale: float = 1.0) -> Callable[..., Array]:
    """Return flax's orthogonal initializer, whose kernels are drawn one after another under vmap.

    Two batched QR factorizations at a time can lock jaxlib for good on CPUs with few cores (seen with 0.10.2).
    """
    draw = nn.initializers.orthogonal(scale)

    def init(key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        kernel: Array = jax.custom_batching.sequential_vmap(lambda key: draw(key, shape, dtype))(key)
        return kernel

    return init


def _parameters(
    module: nn.Module, name: str, shape: tuple[int, ...], fan_in: int, initializer: str, last: bool = False
) -> tuple[Array, Array]:
    """Return the kernel of a layer in the module's compute dtype, and its bias in float32.

    "torch": both uniform in +/- 1 / sqrt(fan-in). "he": He normal kernels and zero biases, last layer 100 times
    smaller, so that a policy starts uniform and a critic near 0. "xavier": kernels uniform with variance
    2 / (fan-in + fan-out) (Glorot and Bengio 2010, equation 16), zero biases. "orthogonal": kernels with orthonormal
    columns or rows times sqrt(2) (Saxe et al. 2014, arXiv 1312.6120), in the last layer times 0.01; zero biases.
    """
    if initializer == "torch":
        kernel_init = bias_init = torch_uniform(fan_in)
    elif initializer == "xavier":
        kernel_init, bias_init = nn.initializers.xavier_uniform(), nn.initializers.zeros
    elif initializer == "orthogonal":
        kernel_init, bias_init = orthogonal(0.01 if last else 2**0.5), nn.initializers.zeros
    else:
        kernel_init, bias_init = he_normal(fan_in, 0.01 if last else 1.0), nn.initializers.zeros
    kernel = module.param(f"{name}_kernel", kernel_init, shape, jnp.float32)
    bias = module.param(f"{name}_bias", bias_init, shape[-1:], jnp.float32)
    return kernel.astype(module.dtype), bias


def linear(module: nn.Module, name: str, x: Array, outputs: int, initializer: str, last: bool = False) -> Array:
    """Return a linear layer of inputs [..., F], float32[..., outputs], with parameters of the module; see above."""
    kernel, bias = _parameters(module, name, (x.shape[-1], outputs), x.shape[-1], initializer, last)
    return (x @ kernel).astype(jnp.float32) + jnp.expand_dims(bias, range(x.ndim - 1))


def _rectify(products: Array, bias: Array) -> Array:
    """ReLU of products [..., F] + bias float32[F], in the products' dtype; a bias' gradient is a float32 sum."""
    rows = products.astype(jnp.float32) + jnp.expand_dims(bias, range(products.ndim - 1))
    return nn.relu(rows).astype(products.dtype)


class TeamNet(nn.Module):
    """Dense layers with parameters shared by all agents; with `communication` an LSTM in between mixes the agents.

    The published networks of the 3v3 snakes baseline (jidiai/Competition_3v3snakes) have no non-linearity after their
    first layer (`rectify_first` False), two hidden layers of 256 units, and with communication (BiCNet, Peng et al.
    2017, arXiv 1703.10069) a bidirectional LSTM over the agents after the first one.
    """

    outputs: int
    hidden_size: int
    depth: int = 2
    communication: bool = False
    rectify_first: bool = True
    layer_norm: bool = False
    initializer: Initialisation = "torch"
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[N, A, ...] -> float32[N, A, outputs]."""
        samples, agents = x.shape[:2]
        x = x.astype(self.dtype).reshape(samples * agents, -1)
        for layer in range(self.depth):
            shape = x.shape[-1], self.hidden_size
            kernel, bias = _parameters(self, f"fc{layer + 1}", shape, x.shape[-1], self.initializer)
            products = x @ kernel
            if layer == 0 and not self.rectify_first:
                x = (products.astype(jnp.float32) + bias[None]).astype(products.dtype)
            elif self.layer_norm:  # Ba et al. 2016, arXiv 1607.06450
                scale = self.param(f"norm{layer + 1}_scale", nn.initializers.ones, bias.shape, jnp.float32)
                shift = self.param(f"norm{layer + 1}_bias", nn.initializers.zeros, bias.shape, jnp.float32)
                x = _norm_relu(products.astype(jnp.float32), bias, scale, shift).astype(products.dtype)
            else:
                x = _rectify(products, bias)
            if layer == 0 and self.communication:
                x = BidirectionalLSTM(self.hidden_size, self.dtype, name="lstm")(x.reshape(samples, agents, -1))
                x = x.reshape(samples * agents, -1)
        kernel, bias = _parameters(self, "out", (x.shape[-1], self.outputs), x.shape[-1], self.initializer, last=True)
        return ((x @ kernel).astype(jnp.float32) + bias[None]).reshape(samples, agents, self.outputs)


@jax.custom_vjp
def _norm_relu(products: Array, bias: Array, scale: Array, shift: Array) -> Array:
    """ReLU of layer norm of products + bias, float32[N, F] for bias, scale and shift float32[F].

    It has a custom gradient, with two sums along rows and one along columns instead of the eight of automatic
    differentiation.
    """
    return _norm_relu_forward(products, bias, scale, shift)[0]


def _norm_relu_forward(products: Array, bias: Array, scale: Array, shift: Array) -> tuple[Array, tuple[Array, ...]]:
    rows = products + bias[None]
    centred = rows - rows.mean(-1, keepdims=True)
    spread = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)
    normal = centred * spread
    out = nn.relu(normal * scale[None] + shift[None])
    return out, (normal, spread, out, scale)


def _norm_relu_backward(residuals: tuple[Array, ...], gradient: Array) -> tuple[Array, ...]:
    normal, spread, out, scale = residuals
    shift_gradient = jnp.where(out > 0, gradient, 0.0)
    scale_gradient = shift_gradient * normal
    normal_gradient = shift_gradient * scale[None]
    removed = normal_gradient.mean(-1, keepdims=True) + normal * (normal_gradient * normal).mean(-1, keepdims=True)
    row_gradient = spread * (normal_gradient - removed)
    return row_gradient, *jnp.stack([row_gradient, scale_gradient, shift_gradient]).sum(1)


_norm_relu.defvjp(_norm_relu_forward, _norm_relu_backward)


class BidirectionalLSTM(nn.Module):
    """One forward and one backward LSTM layer over the agents, from zero states (Hochreiter and Schmidhuber 1997).

    Gates in the order input, forget, cell, output; a bias each for inputs and state, and uniform initialisation in
    +/- 1 / sqrt(hidden_size), as in PyTorch.
    """

    hidden_size: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[N, A, F] -> [N, A, 2 hidden_size]: forward, then backward."""
        agents = x.shape[1]
        there = self._along(x, range(agents), "there")
        back = self._along(x, range(agents - 1, -1, -1), "back")
        return jnp.concatenate([there, back], axis=-1)

    def _along(self, x: Array, order: range, name: str) -> Array:
        gates = 4 * self.hidden_size
        input_kernel, input_bias = _parameters(self, f"{name}_input", (x.shape[-1], gates), self.hidden_size, "torch")
        state_kernel, state_bias = _parameters(
            self, f"{name}_state", (self.hidden_size, gates), self.hidden_size, "torch"
        )
        from_input = (x @ input_kernel).astype(jnp.float32) + (input_bias + state_bias)[None, None]
        state = jnp.zeros((x.shape[0], self.hidden_size), self.dtype)
        cell = jnp.zeros((x.shape[0], self.hidden_size), jnp.float32)
        states = {}
        for agent in order:
            rows = from_input[:, agent] + (state @ state_kernel).astype(jnp.float32)
            input_gate, forget_gate, new, output_gate = jnp.split(rows, 4, axis=-1)
            cell = nn.sigmoid(forget_gate) * cell + nn.sigmoid(input_gate) * jnp.tanh(new)
            state = (nn.sigmoid(output_gate) * jnp.tanh(cell)).astype(self.dtype)
            states[agent] = state
        return jnp.stack([states[agent] for agent in range(len(order))], axis=1)
