"""Data parallelism: the mesh, logical shards, reductions over devices, and chunks that bound memory.

The whole block runs inside one `shard_map` over the mesh axis `data`: every device steps its own environments, and only
`DataParallel` communicates between devices (gradients and metrics). Environments and minibatches are cut into S logical
shards, whatever the number of devices. Randomness belongs to environments and logical shards, never to
devices, so that a run computes the same on any number of devices, up to the order of sums.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from envs_jax.base import Array

AXIS = "data"
SPLIT = PartitionSpec(AXIS)
REPLICATED = PartitionSpec()
# XLA's older code generator for CPUs compiles in two thirds of the time; newer releases do not have it
_OLD_CODE_GENERATOR = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}


def make_mesh(devices: int) -> Mesh:
    """Return a mesh of `devices` devices, the first ones of every host."""
    per_host = devices // jax.process_count()
    chosen = [device for host in range(jax.process_count()) for device in jax.local_devices(host)[:per_host]]
    return Mesh(np.array(chosen), (AXIS,), axis_types=(AxisType.Auto,))


def compiler_options(once: bool = False) -> dict[str, Any]:
    """Return options of the compiler for a program with loops, or for one that runs `once`.

    On CPUs the latter is compiled quickly and runs slowly.

    On GPUs loops and branches become CUDA graphs, which run without the host, unless JAXRL_GRAPHS=off is set.
    Convolutions cannot be part of one, nor can the copies that the dynamic-slice-annotator makes of arrays that loops
    write into.
    """
    if jax.default_backend() == "cpu":
        return {"xla_backend_optimization_level": 0} | _OLD_CODE_GENERATOR if once else {}
    if jax.default_backend() != "gpu":
        return {}
    if os.environ.get("JAXRL_GRAPHS") == "off":
        return {"xla_gpu_enable_command_buffer": ""}  # otherwise XLA makes graphs outside loops
    kinds = "FUSION,CUBLAS,CUBLASLT,CUDNN,COLLECTIVES,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
    return {
        "xla_gpu_enable_command_buffer": kinds,
        "xla_gpu_graph_min_graph_size": 1,
        "xla_disable_hlo_passes": "dynamic-slice-annotator",
    }


def on_mesh(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return `function` run once per device on that device's part of the arguments, with full float32 products."""

    def precise(*arguments: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return function(*arguments)

    return jax.shard_map(precise, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """Return NamedShardings for a tree of PartitionSpecs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def on_all(tree: Any, mesh: Mesh) -> Any:
    """Return arrays and keys on every device of the mesh, on all hosts; those that are there already are not copied."""
    everywhere = NamedSharding(mesh, REPLICATED)
    if jax.process_count() == 1:
        return jax.device_put(tree, everywhere)  # compiles nothing
    return jax.jit(_same, out_shardings=everywhere)(tree)


def _same(tree: Any) -> Any:  # not a lambda, which would be compiled anew for each call
    return tree


def logical_shards(num_envs: int, batch: int) -> int:
    """Return S, the largest of 8, 4, 2, 1 that divides the environments and the minibatch."""
    return next(shards for shards in (8, 4, 2, 1) if num_envs % shards == 0 and batch % shards == 0)


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is at most `limit` (at least 1)."""
    return next(d for d in range(min(number, max(limit, 1)), 0, -1) if number % d == 0)


def jit_inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` traced once for both its shapes and its call, and inlined."""
    return jax.jit(function, inline=True)


def map_chunks(function: Callable[[Any], Any], batch: Any, chunks: int, out_axes: Any, in_axis: int = 0) -> Any:
    """Apply `function` to `chunks` equal parts of the batch (`in_axis` of every leaf) one after another.

    Outputs are written into place, part by part, along the axis that `out_axes` (a prefix tree of ints) names,
    without a second copy.
    """
    if chunks == 1:
        return function(batch)
    make_buffers, write = prepare_chunks(function, batch, chunks, out_axes, in_axis)
    return jax.lax.fori_loop(np.int32(0), np.int32(chunks), write, make_buffers())


def prepare_chunks(
    function: Callable[[Any], Any], batch: Any, chunks: int, out_axes: Any, in_axis: int = 0
) -> tuple[Callable[[], Any], Callable[[Array, Any], Any]]:
    """Return what `map_chunks` does chunk by chunk: () -> empty buffers, (index of a chunk, buffers) -> buffers."""
    size = jax.tree.leaves(batch)[0].shape[in_axis] // chunks
    function = jit_inline(function)

    def part(index: Array) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index * size, size, in_axis), batch)

    shapes = jax.eval_shape(lambda: function(part(jnp.int32(0))))
    axes = jax.tree.map(lambda axis, tree: jax.tree.map(lambda _: axis, tree), out_axes, shapes)

    def buffer(shape: jax.ShapeDtypeStruct, axis: int) -> Array:
        sizes = tuple(n * chunks if k == axis else n for k, n in enumerate(shape.shape))
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), sizes)
        return jnp.zeros(sizes, shape.dtype)

    def write(index: Array, buffers: Any) -> Any:
        def place(buffer: Array, value: Array, axis: int) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(buffer, value, index * value.shape[axis], axis)

        return jax.tree.map(place, buffers, function(part(index)), axes)

    return lambda: jax.tree.map(buffer, shapes, axes), write


@dataclasses.dataclass(frozen=True)
class DataParallel:
    """Batch sizes that an algorithm needs, and reductions over devices.

    Attributes:
        num_envs: B, environments over all devices.
        shards: S, logical shards over all devices.
        devices: devices of the mesh; with 1 no collective is used, so that everything also runs outside a mesh.
        learn_chunk: samples per gradient evaluation, 0 for all at once; gradients are accumulated over chunks.
        compute_dtype: of matmuls and convolutions in networks.
    """

    num_envs: int
    shards: int = 1
    devices: int = 1
    learn_chunk: int = 0
    compute_dtype: Any = jnp.float32

    @property
    def local_shards(self) -> int:
        return self.shards // self.devices

    @property
    def local_envs(self) -> int:
        return self.num_envs // self.devices

    def env_indices(self) -> Array:
        """Return the environments on this device, int32[B local]."""
        return self._indices(self.local_envs)

    def _indices(self, count: int) -> Array:
        """Return the global indices of this device's `count` rows, int32[count]."""
        first = jax.lax.axis_index(AXIS) * count if self.devices > 1 else 0
        return first + jnp.arange(count, dtype=jnp.int32)

    def shard_keys(self, key: Array) -> Array:
        """Return one key per logical shard, key[S local]."""
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, self._indices(self.local_shards))

    def split(self, batch: Any) -> Any:
        """Reshape [B local, ...] to [S local, B / S, ...] in every leaf."""
        return jax.tree.map(lambda x: x.reshape(self.local_shards, -1, *x.shape[1:]), batch)

    def mean(self, values: Any) -> Any:
        """Mean over all logical shards of leaves [S local, ...] -> [...], the same on every device."""
        local = jax.tree.map(lambda x: x.mean(0), values)
        return jax.lax.pmean(local, AXIS) if self.devices > 1 else local

    def sum(self, values: Any) -> Any:
        """Sum over all rows of all devices, leaves [rows of this device, ...] -> [...]."""
        local = jax.tree.map(lambda x: x.sum(0), values)
        return jax.lax.psum(local, AXIS) if self.devices > 1 else local

    def sample_mean(self, samples: Array) -> Array:
        """Mean over all samples of all logical shards, [S local, m, ...] -> []."""
        return self.mean(samples.reshape(len(samples), -1).mean(1))

    def all_gather(self, samples: Any) -> tuple[Any, Array | int]:
        """Gather samples [n, ...] of all devices, inside a loss of `gradient`: [n devices, ...], this one's offset."""
        if self.devices == 1:
            return samples, 0
        count = jax.tree.leaves(samples)[0].shape[0]
        gathered = jax.tree.map(lambda x: jax.lax.all_gather(x, AXIS, tiled=True), samples)
        return gathered, jax.lax.axis_index(AXIS) * count

    def device_mean(self, values: Any) -> Any:
        """Mean over devices inside a loss of `gradient`, for the divisor of a ratio of sums over all samples.

        `gradient` takes the mean of losses: where each divides by its own count, devices with few samples count too
        much.
        """
        return values if self.devices == 1 else jax.lax.pmean(values, AXIS)

    def _pieces(self, data: Any, per_row: int = 1) -> tuple[int, Any]:
        """Split data [S local, m, ...] into (number of pieces, leaves [pieces, rows, ...]) by `learn_chunk`.

        A row counts as `per_row` samples.
        """
        shards, rows = jax.tree.leaves(data)[0].shape[:2]
        samples = shards * rows
        chunk = largest_divisor(samples, self.learn_chunk // per_row) if self.learn_chunk else samples
        pieces = samples // chunk
        return pieces, jax.tree.map(lambda x: x.reshape(pieces, chunk, *x.shape[2:]), data)

    def apply(self, function: Callable[[Any], Any], data: Any, per_row: int = 1) -> Any:
        """Apply `function` (rows [n, ...] -> [n, ...]) to data [S local, m, ...], chunk by chunk."""
        shards, rows = jax.tree.leaves(data)[0].shape[:2]
        pieces, chunks = self._pieces(data, per_row)
        if pieces == 1:
            out = jax.tree.map(lambda x: x[None], function(jax.tree.map(lambda x: x[0], chunks)))
        else:
            out = jax.lax.map(function, chunks)
        return jax.tree.map(lambda x: x.reshape(shards, rows, *x.shape[2:]), out)

    def gradient(
        self, loss: Callable[[Any, Any], tuple[Array, Any]], params: Any, data: Any, per_row: int = 1
    ) -> tuple[Any, tuple[Array, Any]]:
        """Return the gradient of the mean loss over data [S local, m, ...] of all devices.

        Args:
            loss: (params, samples [n, ...]) -> (mean loss over the samples, dict of mean values).
            params: what to differentiate with respect to; the same on every device.
            data: this device's part of the minibatch.
            per_row: how many samples a row counts as for `learn_chunk`.

        Returns:
            gradients, (loss, dict), equal on every device.
        """
        _, chunks = self._pieces(data, per_row)
        value_and_grad = functools.partial(jax.value_and_grad(loss, has_aux=True), params)
        value, gradient = _mean_over(value_and_grad, chunks)
        if self.devices > 1:
            flat, unravel = ravel_pytree((value, gradient))  # one reduction, not one for each leaf
            value, gradient = unravel(jax.lax.pmean(flat, AXIS))
        return gradient, value


def _mean_over(function: Callable[[Any], Any], chunks: Any) -> Any:
    """Return the mean of function(chunk) over the leading axis, accumulated one after another."""
    count = jax.tree.leaves(chunks)[0].shape[0]
    first = jax.tree.map(lambda x: x[0], chunks)
    if count == 1:
        return function(first)
    function = jit_inline(function)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, first))
    total, _ = jax.lax.scan(lambda sum_, x: (jax.tree.map(jnp.add, sum_, function(x)), None), zeros, chunks)
    return jax.tree.map(lambda x: x / count, total)
