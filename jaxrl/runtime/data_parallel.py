"""Data parallelism: the mesh, logical shards, reductions over devices, and chunks that bound memory.

The whole block runs inside one `shard_map` over the mesh axis `data`: every device steps its own environments
and the only collectives are those of `DataParallel` (gradients and metrics). Environments and minibatches are cut into
S logical shards whatever the number of devices.

With `exact` a run is bit-identical on any number of devices. That takes four things:
- everything is computed at the shape of one logical shard, and sums over shards have a fixed order;
- every mix of products and sums is passed to `isolate`: fusion decides where fused multiply-adds round;
- programs are compiled with `DataParallel.compiler_options`, so that arithmetic is done as written;
- randomness belongs to environments and logical shards, never to devices.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from envs_jax.base import Array

AXIS = "data"
SPLIT, REPLICATED = PartitionSpec(AXIS), PartitionSpec()


def make_mesh(devices: int) -> Mesh:
    """Return a mesh of `devices` devices, the first ones of every host."""
    each = devices // jax.process_count()
    chosen = [device for host in range(jax.process_count()) for device in jax.local_devices(host)[:each]]
    return Mesh(np.array(chosen), (AXIS,), axis_types=(AxisType.Auto,))


def graphs(*passes: str) -> dict[str, Any]:
    """Return compiler options of programs with loops, which disable some of XLA's passes over HLO.

    On GPUs loops and branches become CUDA graphs, which run without the host, unless JAXRL_GRAPHS=off is set.
    Convolutions cannot be part of one, nor can the copies that the dynamic-slice-annotator makes of arrays that loops
    write into.
    """
    options: dict[str, Any] = {}
    if jax.default_backend() == "gpu" and os.environ.get("JAXRL_GRAPHS") == "off":
        options = {"xla_gpu_enable_command_buffer": ""}  # otherwise XLA makes graphs outside loops
    elif jax.default_backend() == "gpu":
        kinds = "FUSION,CUBLAS,CUBLASLT,CUDNN,COLLECTIVES,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
        options = {"xla_gpu_enable_command_buffer": kinds, "xla_gpu_graph_min_graph_size": 1}
        passes = (*passes, "dynamic-slice-annotator")
    return options | ({"xla_disable_hlo_passes": ",".join(passes)} if passes else {})


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
    """Copy arrays and keys to every device of the mesh, on all hosts."""
    return jax.jit(_same, out_shardings=NamedSharding(mesh, REPLICATED))(tree)


def _same(tree: Any) -> Any:  # not a lambda, which would be compiled anew for each call
    return tree


def logical_shards(num_envs: int, batch: int) -> int:
    """Return S, the largest of 8, 4, 2, 1 that divides the environments and the minibatch."""
    return next(shards for shards in (8, 4, 2, 1) if num_envs % shards == 0 and batch % shards == 0)


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is at most `limit` (at least 1)."""
    return next(d for d in range(min(number, max(limit, 1)), 0, -1) if number % d == 0)


def traced_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` traced once for both its shapes and its call, and inlined."""
    return jax.jit(function, inline=True)


def map_chunks(function: Callable[[Any], Any], batch: Any, chunks: int, out_axes: Any, in_axis: int = 0) -> Any:
    """Apply `function` to `chunks` equal parts of the batch (`in_axis` of every leaf) one after another.

    Outputs are written into place, part by part, along the axis that `out_axes` (a prefix tree of ints) names,
    without a second copy.
    """
    if chunks == 1:
        return function(batch)
    make_buffers, write = chunked(function, batch, chunks, out_axes, in_axis)
    return jax.lax.fori_loop(np.int32(0), np.int32(chunks), write, make_buffers())


def chunked(
    function: Callable[[Any], Any], batch: Any, chunks: int, out_axes: Any, in_axis: int = 0
) -> tuple[Callable[[], Any], Callable[[Array, Any], Any]]:
    """Return what `map_chunks` does chunk by chunk: () -> empty buffers, (index of a chunk, buffers) -> buffers."""
    size = jax.tree.leaves(batch)[0].shape[in_axis] // chunks
    function = traced_once(function)

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


def isolate(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled separately, so that its bits depend on its arguments alone.

    Fused arithmetic may contract to fused multiply-adds, and what is fused depends on the surroundings, which
    differ with the number of devices. A branch of unknown condition is not fused with operations outside it.
    """

    def call(*arguments: Any) -> Any:
        once = traced_once(function)
        shapes = jax.eval_shape(once, *arguments)
        zeros = lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # noqa: E731
        return jax.lax.cond(jax.lax.optimization_barrier(jnp.bool_(True)), once, zeros, *arguments)

    return call


@dataclasses.dataclass(frozen=True)
class DataParallel:
    """Batch sizes that an algorithm needs, and reductions over devices.

    Attributes:
        num_envs: B, environments over all devices.
        shards: S, logical shards over all devices.
        devices: devices of the mesh; with 1 no collective is used, so that everything also runs outside a mesh.
        exact: sum in a fixed order at the shape of one logical shard.
        learn_chunk: samples per gradient evaluation, 0 for all at once; gradients are accumulated over chunks.
        compute_dtype: of matmuls and convolutions in networks.
        options: of the compiler, (name, value) each.
    """

    num_envs: int
    shards: int = 1
    devices: int = 1
    exact: bool = False
    learn_chunk: int = 0
    compute_dtype: Any = jnp.float32
    options: tuple[tuple[str, str | bool], ...] = ()

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Return the options for every program that makes training state: `graphs`, `options`, and more if `exact`.

        XLA's algebraic simplifier turns x / broadcast(y) into x * (1 / y) and the like, which rounds differently.
        Where it does so depends on which equal values are already merged, and the SPMD partitioner, which runs with
        several devices only, merges them earlier. Without it every branch compiles to the same instructions on any
        number of devices. On CPUs a small loop becomes a single kernel, whose arithmetic is fused across `isolate`
        parts; with several devices there is no such loop around one shard.
        With --xla_backend_optimization_level=0 in XLA_FLAGS bits still differ: the instructions of equal HLO then
        depend on the program around it. On GPUs sums must not depend on the order of threads, nor algorithms on a race.
        """
        own = dict(self.options)
        passes = [name for name in str(own.pop("xla_disable_hlo_passes", "")).split(",") if name]
        if not self.exact:
            return graphs(*passes) | own
        fixed = {"xla_gpu_deterministic_ops": True} if jax.default_backend() == "gpu" else {}
        return graphs("algsimp", "small-while-loop-hoisting") | fixed | own

    @property
    def local_shards(self) -> int:
        return self.shards // self.devices

    @property
    def local_envs(self) -> int:
        return self.num_envs // self.devices

    def env_indices(self) -> Array:
        """Return the environments on this device, int32[B local]."""
        return self._indices(self.local_envs)

    def _indices(self, number: int) -> Array:
        """Return the indices on this device, int32[number], of what every device has as many of."""
        first = jax.lax.axis_index(AXIS) * number if self.devices > 1 else 0
        return first + jnp.arange(number, dtype=jnp.int32)

    def shard_keys(self, key: Array) -> Array:
        """Return one key per logical shard, key[S local]."""
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, self._indices(self.local_shards))

    def split(self, batch: Any) -> Any:
        """Reshape [B local, ...] to [S local, B / S, ...] in every leaf."""
        return jax.tree.map(lambda x: x.reshape(self.local_shards, -1, *x.shape[1:]), batch)

    def mean(self, values: Any) -> Any:
        """Mean over all logical shards of leaves [S local, ...] -> [...], the same on every device."""
        in_order = lambda rows: _mean_over(lambda row: row, rows)  # noqa: E731
        return self._reduce(values, lambda x: x.mean(0), jax.lax.pmean, in_order)

    def _reduce(self, values: Any, local: Any, over_devices: Any, in_order: Callable[[Any], Any]) -> Any:
        """Reduce the first axis of leaves, if `exact` that of all devices together, `in_order`."""
        if not self.exact:
            values = jax.tree.map(local, values)
            return over_devices(values, AXIS) if self.devices > 1 else values
        if self.devices > 1:
            values = jax.tree.map(lambda x: jax.lax.all_gather(x, AXIS, tiled=True), values)
        return isolate(in_order)(values)

    def sample_mean(self, samples: Array) -> Array:
        """Mean over all samples of all logical shards, [S local, m] -> []."""
        return self.mean(jax.lax.map(isolate(jnp.mean), samples) if self.exact else samples.mean(1))

    def deterministic(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` of replicated values, bit-identical on any number of devices if `exact`."""
        return isolate(function) if self.exact else function

    def all_gather(self, samples: Any) -> tuple[Any, Array | int]:
        """Gather samples [n, ...] of all devices inside a loss of `gradient`: [n devices, ...], and this one's offset.

        With `exact` nothing is gathered across logical shards.
        """
        if self.exact or self.devices == 1:
            return samples, 0
        number = jax.tree.leaves(samples)[0].shape[0]
        every = jax.tree.map(lambda x: jax.lax.all_gather(x, AXIS, tiled=True), samples)
        return every, jax.lax.axis_index(AXIS) * number

    def device_mean(self, values: Any) -> Any:
        """Mean over devices inside a loss of `gradient`, for the divisor of a ratio of sums over all samples.

        `gradient` takes the mean of losses: where each divides by its own count, devices with few samples count too
        much. With `exact` nothing crosses logical shards, and values stay as they are.
        """
        return values if self.exact or self.devices == 1 else jax.lax.pmean(values, AXIS)

    def map_shards(self, function: Callable[[Any], Any], batch: Any, axis: int) -> Any:
        """Apply `function` to this device's environments, on `axis` of all its arguments and results.

        With `exact` it gets the environments of one logical shard at a time.
        """
        if not self.exact:
            return function(batch)
        return map_chunks(isolate(function), batch, self.local_shards, axis, axis)

    def sum(self, values: Any) -> Any:
        """Sum over all rows of all devices, leaves [rows of this device, ...] -> [...]."""
        total = lambda x: x.sum(0)  # noqa: E731
        return self._reduce(values, total, jax.lax.psum, lambda rows: jax.tree.map(total, rows))

    def _pieces(self, data: Any, per_row: int = 1) -> tuple[int, Any]:
        """Split data [S local, m, ...] into (number of pieces, leaves [pieces, rows, ...]) by `learn_chunk`.

        A piece never crosses logical shards in exact mode; a row stands for `per_row` samples.
        """
        shards, rows = jax.tree.leaves(data)[0].shape[:2]
        whole = rows if self.exact else shards * rows
        chunk = largest_divisor(whole, self.learn_chunk // per_row) if self.learn_chunk else whole
        pieces = shards * rows // chunk
        return pieces, jax.tree.map(lambda x: x.reshape(pieces, chunk, *x.shape[2:]), data)

    def apply(self, function: Callable[[Any], Any], data: Any, per_row: int = 1) -> Any:
        """Apply `function` (rows [n, ...] -> [n, ...]) to data [S local, m, ...], chunk by chunk."""
        shards, rows = jax.tree.leaves(data)[0].shape[:2]
        pieces, chunks = self._pieces(data, per_row)
        function = self.deterministic(function)
        if pieces == 1:
            out = jax.tree.map(lambda x: x[None], function(jax.tree.map(lambda x: x[0], chunks)))
        else:
            out = jax.lax.map(function, chunks)
        return jax.tree.map(lambda x: x.reshape(shards, rows, *x.shape[2:]), out)

    def gradient(
        self, loss: Callable[[Any, Any], tuple[Array, Any]], params: Any, data: Any
    ) -> tuple[Any, tuple[Array, Any]]:
        """Return the gradient of the mean loss over data [S local, m, ...] of all devices.

        Args:
            loss: (params, samples [n, ...]) -> (mean loss over the samples, dict of mean values).
            params: what to differentiate with respect to; the same on every device.
            data: this device's part of the minibatch.

        Returns:
            gradients, (loss, dict), equal on every device.
        """
        pieces, chunks = self._pieces(data)
        value_and_grad = jax.value_and_grad(loss, has_aux=True)

        def evaluate(params: Any, samples: Any) -> Any:
            value, gradient = value_and_grad(params, samples)
            return gradient, value

        if self.exact:
            shards = self.local_shards
            grouped = jax.tree.map(lambda x: x.reshape(shards, pieces // shards, *x.shape[1:]), chunks)
            of_shard = isolate(lambda params, shard: _mean_over(lambda chunk: evaluate(params, chunk), shard))
            return self.mean(jax.lax.map(lambda shard: of_shard(params, shard), grouped))
        result = _mean_over(lambda chunk: evaluate(params, chunk), chunks)
        return jax.lax.pmean(result, AXIS) if self.devices > 1 else result


def _mean_over(function: Callable[[Any], Any], chunks: Any) -> Any:
    """Return the mean of function(chunk) over the leading axis, accumulated one after another."""
    number = jax.tree.leaves(chunks)[0].shape[0]
    first = jax.tree.map(lambda x: x[0], chunks)
    if number == 1:
        return function(first)
    function = traced_once(function)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, first))
    total, _ = jax.lax.scan(lambda sum_, x: (jax.tree.map(jnp.add, sum_, function(x)), None), zeros, chunks)
    return jax.tree.map(lambda x: x / number, total)
