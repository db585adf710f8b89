"""Gradients, sums and means over devices and chunks are those of the whole batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.off_policy import digest

from envs_jax.base import Array
from jaxrl.rl.data_parallel import REPLICATED, SPLIT, DataParallel, make_mesh, map_chunks, on_mesh

ENVS, SHARDS = 16, 8


def loss(params: dict[str, Array], samples: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
    out = jnp.tanh(samples["x"] @ params["w"]) + params["b"][None]
    error = jnp.square(out - samples["y"])
    return jnp.mean(error), {"first": jnp.mean(out[:, 0])}


loss_and_gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize("learn_chunk", [0, 4])
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow), 8])
def test_gradient_is_that_of_the_whole_batch(devices: int, learn_chunk: int) -> None:
    rng = np.random.default_rng(0)

    def draw(*shape: Any) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    params, batch = {"w": draw(5, 3), "b": draw(3)}, {"x": draw(8, 12, 5), "y": draw(8, 12, 3)}
    whole = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), batch)
    (value, aux), gradient = loss_and_gradient(params, whole)

    layout = DataParallel(ENVS, SHARDS, devices, learn_chunk)
    function = on_mesh(
        lambda params, batch: layout.gradient(loss, params, batch), make_mesh(devices), (REPLICATED, SPLIT), REPLICATED
    )
    result = jax.jit(function)(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), result, (gradient, (value, aux)))


@pytest.mark.parametrize("devices", [1, 4])
def test_sums_and_means_go_over_all_devices(devices: int) -> None:
    layout = DataParallel(ENVS, SHARDS, devices)

    def function(x: Array) -> Any:
        return layout.sum(x), layout.mean(x), layout.sample_mean(x)

    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    result = jax.jit(on_mesh(function, make_mesh(devices), (SPLIT,), REPLICATED))(rows)
    for actual, expected in zip(result, (rows.sum(0), rows.mean(0), rows.mean()), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(("learn", "forward", "expected"), [(0, 0, 24), (4, 0, 4), (4, 9, 8), (4, 100, 24)])
def test_a_pass_without_gradient_has_chunks_of_its_own(learn: int, forward: int, expected: int) -> None:
    layout = DataParallel(12, 2, 1, learn_chunk=learn, forward_chunk=forward)
    sizes = []

    def double(rows: jax.Array) -> jax.Array:
        sizes.append(len(rows))
        return 2 * rows

    data = jnp.arange(24.0).reshape(2, 12)
    np.testing.assert_array_equal(layout.apply(double, data), 2 * data)
    assert set(sizes) == {expected}


@pytest.mark.parametrize("chunks", [1, 2, 3, 6])
def test_chunks_give_what_one_call_gives(chunks: int) -> None:
    batch = {"x": np.arange(24, dtype=np.float32).reshape(6, 4), "key": jax.random.split(jax.random.key(3), 6)}

    def function(part: Any) -> Any:
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(part["key"], 7)
        over_time = {"x": jnp.stack([part["x"], 2 * part["x"]]), "key": jnp.stack([part["key"], keys])}  # [T, B, ...]
        return {"state": (keys, part["x"] > 3)}, over_time

    expected = jax.jit(function)(batch)
    actual = jax.jit(lambda batch: map_chunks(function, batch, chunks, out_axes=(0, 1)))(batch)
    assert digest(actual) == digest(expected)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), actual) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
    back = jax.jit(
        lambda outputs: map_chunks(lambda rows: jax.tree.map(lambda x: x[0], rows), outputs, chunks, 0, in_axis=1)
    )(expected[1])
    assert digest(back) == digest(batch)
