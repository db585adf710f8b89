"""Networks of images: ways to convolve, strides, dtypes and initial weights."""

import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.coma import close

from jaxrl.nn import convolutions, networks
from jaxrl.nn.team_policy import Sizes


@pytest.mark.parametrize(("shape", "stride"), [((9, 12, 2), 1), ((11, 12, 2), 2)])
def test_ways_to_convolve_agree_in_value_and_gradient(shape: tuple[int, int, int], stride: int) -> None:
    x = np.random.default_rng(0).random((3, *shape), np.float32)
    methods = get_args(convolutions.Convolution)
    stacks = {method: networks.ConvStack(5, 8, methods=(method,) * 3, stride=stride) for method in methods}
    params = jax.jit(stacks["conv"].init)(jax.random.key(1), x)

    @jax.jit
    def all_ways(params: Any, x: jax.Array) -> Any:
        """Outputs; the sum of their sines with its slopes, by parameters and by pixels."""
        outputs = {method: net.apply(params, x) for method, net in stacks.items()}
        slopes = {
            method: jax.value_and_grad(lambda p, x, net=net: jnp.sum(jnp.sin(net.apply(p, x))), argnums=(0, 1))(
                params, x
            )
            for method, net in stacks.items()
        }
        return outputs, slopes

    outputs, results = all_ways(params, x)
    for method in ("dense", "patches"):
        close(outputs[method], outputs["conv"], 1e-6)
        jax.tree.map(lambda a, b: close(a, b, 2e-6, 1e-5), results[method], results["conv"])
    assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(results["conv"][1]))


@pytest.mark.parametrize("method", get_args(convolutions.Convolution))
def test_stride_leaves_out_outputs(method: convolutions.Convolution) -> None:
    rng = np.random.default_rng(0)
    x, kernel = rng.random((2, 11, 12, 3), np.float32), rng.random((5, 4, 3, 6), np.float32)
    convolve = functools.partial(convolutions.convolve, method=method)
    every, second = (jax.jit(functools.partial(convolve, stride=stride))(x, kernel) for stride in (1, 2))
    assert second.shape == (2, 4, 5, 6)
    close(second, every[:, ::2, ::2], 1e-5)


def test_images_too_small_for_the_stride_are_refused() -> None:
    sizes = Sizes(hidden_size=8, depth=1, initializer="he", stride=2, convolution="auto", dtype=None)
    network = sizes.make_network(5, (11, 11, 2))
    assert isinstance(network, networks.ConvStack) and network.stride == 2
    with pytest.raises(ValueError, match=r"at least 11 x 11 pixels, not 10 x 12: choose --stride 1"):
        sizes.make_network(5, (10, 12, 2))


def test_networks_return_float32_whatever_they_compute_in() -> None:
    x = np.random.default_rng(0).random((3, 11, 11, 2), np.float32)
    exact = networks.ConvStack(5, 8)
    coarse = networks.ConvStack(5, 8, dtype=jnp.bfloat16)
    params = jax.jit(coarse.init)(jax.random.key(1), x)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    roughly, exactly = jax.jit(lambda params: (coarse.apply(params, x), exact.apply(params, x)))(params)
    assert roughly.dtype == jnp.float32
    close(roughly, exactly, 2e-2)
    assert np.abs(np.asarray(roughly) - np.asarray(exactly)).max() > 0


def test_he_networks_start_near_zero() -> None:
    x = np.random.default_rng(0).random((4, 11, 11, 2), np.float32)
    net = networks.ConvStack(5, 32, initializer="he")
    params = jax.jit(net.init)(jax.random.key(1), x)
    assert np.abs(jax.jit(net.apply)(params, x)).max() < 0.05
    assert all(not np.any(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params) if "bias" in str(path))
