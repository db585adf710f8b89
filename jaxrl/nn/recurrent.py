"""Networks with a memory: an encoder of each observation, GRU or LSTM layers over the steps of an episode, and a head.

Layout letters: N sequences, T steps, F features, H units of a layer.
"""

from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from envs_jax.base import Array
from jaxrl.common.types import Key
from jaxrl.nn.networks import Initialisation, orthogonal, torch_uniform

Memory = Literal["none", "gru", "lstm"]
Carry = dict[str, Array]  # "hidden1" and, for an LSTM, "cell1" of the first layer, and so on: float32[..., H]
GATES = {"gru": 3, "lstm": 4}


def zero_carry(memory: Memory, size: int, layers: int, batch: tuple[int, ...]) -> Any:
    """Return the carry at the start of an episode, leaves float32[*batch, size], () without a memory."""
    if memory == "none":
        return ()
    names = ("hidden", "cell") if memory == "lstm" else ("hidden",)
    return {f"{name}{layer + 1}": jnp.zeros((*batch, size), jnp.float32) for layer in range(layers) for name in names}


class Recurrent(nn.Module):
    """An encoder, `layers` layers of a GRU or an LSTM with H = `size` units, and a head.

    With the input x and the state h of a layer, kernels W and U, biases b and c, and s the logistic function:

    GRU (Cho et al. 2014, arXiv 1406.1078, with the reset gate after the product, as in PyTorch and cuDNN), gates in the
    order r, z, n: r = s(W x + b + U h + c), z likewise, n = tanh(W x + b + r (U h + c)), h' = (1 - z) n + z h.

    LSTM (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000), gates in the order i, f, g, o:
    i, f, o = s(W x + b + U h + c), g = tanh(W x + b + U h + c), c' = f c + i g, h' = o tanh(c').

    Where an episode begins, the state is 0. Initialisation: "torch" as PyTorch, uniform in +/- 1 / sqrt(H); otherwise
    the kernels of each gate are orthogonal, and the biases 0.
    """

    encoder: nn.Module | None  # [N, ...] -> [N, F]; None: inputs are [N, T, F]
    head: nn.Module  # [N, H] -> float32[N, outputs]
    memory: Memory
    size: int
    layers: int = 1
    initializer: Initialisation = "orthogonal"
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array, first: Array | None = None, carry: Carry | None = None) -> tuple[Array, Carry]:
        """Return the outputs float32[N, T, outputs] of inputs [N, T, ...], and the carry after step T.

        Args:
            x: the inputs.
            first: bool[N, T], True where an episode begins; None: nowhere.
            carry: leaves float32[N, H], before step 1; None: zeros.
        """
        lead = x.shape[:2]
        if first is None:
            first = jnp.zeros(lead, bool)
        if carry is None:
            carry = zero_carry(self.memory, self.size, self.layers, lead[:1])
        rows = x if self.encoder is None else self.encoder(x.reshape(-1, *x.shape[2:])).reshape(*lead, -1)
        new_carry: Carry = {}
        for layer in range(1, self.layers + 1):
            names = [f"{name}{layer}" for name in ("hidden", "cell") if f"{name}{layer}" in carry]
            rows, states = self._run_layer(layer, rows, first, tuple(carry[name] for name in names))
            new_carry |= dict(zip(names, states, strict=True))
        return self.head(rows.reshape(-1, self.size)).reshape(*lead, -1), new_carry

    def _run_layer(
        self, layer: int, rows: Array, first: Array, states: tuple[Array, ...]
    ) -> tuple[Array, tuple[Array, ...]]:
        """Return the hidden states float32[N, T, H] of inputs [N, T, F], and the states after step T."""
        input_kernel, input_bias = self._gates(f"memory{layer}_input", rows.shape[-1])
        state_kernel, state_bias = self._gates(f"memory{layer}_state", self.size)
        update = update_gru if self.memory == "gru" else update_lstm
        from_input = (rows.astype(self.dtype) @ input_kernel).astype(jnp.float32) + input_bias[None, None]

        def take_step(states: tuple[Array, ...], inputs: tuple[Array, Array]) -> tuple[tuple[Array, ...], Array]:
            row, begins = inputs
            states = tuple(jnp.where(begins[:, None], 0.0, state) for state in states)
            from_state = (states[0].astype(self.dtype) @ state_kernel).astype(jnp.float32) + state_bias[None]
            states = update(row, from_state, *states)
            return states, states[0]

        if rows.shape[1] == 1:  # without a loop, for which exported formats have no operator
            states, hidden = take_step(states, (from_input[:, 0], first[:, 0]))
            return hidden[:, None], states
        states, hidden = jax.lax.scan(take_step, states, (jnp.swapaxes(from_input, 0, 1), first.T))
        return jnp.swapaxes(hidden, 0, 1), states

    def _gates(self, name: str, inputs: int) -> tuple[Array, Array]:
        """Return the kernel [inputs, gates H] in the compute dtype, and the bias float32[gates H]."""
        kernel_init = bias_init = torch_uniform(self.size)
        if self.initializer != "torch":
            kernel_init, bias_init = orthogonal_gates(self.size), nn.initializers.zeros
        width = GATES[self.memory] * self.size
        kernel = self.param(f"{name}_kernel", kernel_init, (inputs, width), jnp.float32)
        return kernel.astype(self.dtype), self.param(f"{name}_bias", bias_init, (width,), jnp.float32)


def update_gru(from_input: Array, from_state: Array, hidden: Array) -> tuple[Array]:
    """Return the next hidden state [N, H] of W x + b and U h + c [N, 3 H], see `Recurrent`."""
    input_reset, input_update, input_new = jnp.split(from_input, 3, axis=-1)
    state_reset, state_update, state_new = jnp.split(from_state, 3, axis=-1)
    update = nn.sigmoid(input_update + state_update)
    new = jnp.tanh(input_new + nn.sigmoid(input_reset + state_reset) * state_new)
    return ((1 - update) * new + update * hidden,)


def update_lstm(from_input: Array, from_state: Array, hidden: Array, cell: Array) -> tuple[Array, Array]:
    """Return the next hidden state and cell [N, H] of W x + b and U h + c [N, 4 H], see `Recurrent`."""
    del hidden
    input_gate, forget_gate, new, output_gate = jnp.split(from_input + from_state, 4, axis=-1)
    cell = nn.sigmoid(forget_gate) * cell + nn.sigmoid(input_gate) * jnp.tanh(new)
    return nn.sigmoid(output_gate) * jnp.tanh(cell), cell


def orthogonal_gates(size: int) -> Callable[..., Array]:
    """Return an initializer of kernels [inputs, gates size] with orthonormal columns or rows in each gate."""

    def init(key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        keys = jax.random.split(key, shape[1] // size)
        gate_init = orthogonal()
        return jnp.concatenate([gate_init(gate_key, (shape[0], size), dtype) for gate_key in keys], axis=1)

    return init
