"""Running mean and variance of observations or returns, to normalise them."""

import jax
import jax.numpy as jnp

from envs_jax.base import Array, pytree
from jaxrl.rl.data_parallel import DataParallel

INPUT_LIMIT = 10.0  # normalised inputs lie in +/- this


@pytree
class RunningStatistics:
    """Moments of everything seen so far.

    Attributes:
        count: float32[], samples.
        mean, variance: float32[...], the shape of a sample.
    """

    count: Array
    mean: Array
    variance: Array

    def merge(self, mean: Array, variance: Array, count: Array | float) -> "RunningStatistics":
        """Add `count` samples with these moments (Chan, Golub and LeVeque 1979, equation 2.1); none change nothing."""
        total, change = self.count + count, mean - self.mean
        share = count / jnp.maximum(total, 1.0)
        spread = (1 - share) * self.variance + share * variance + share * (1 - share) * jnp.square(change)
        return RunningStatistics(total, self.mean + share * change, spread)

    @property
    def deviation(self) -> Array:
        """Standard deviation float32[...], at least 1e-4."""
        return jnp.sqrt(self.variance + 1e-8)

    def normalize(self, samples: Array) -> Array:
        """Return samples [*batch, ...] less the mean, over the deviation."""
        return (samples - _wide(self.mean, samples)) / _wide(self.deviation, samples)

    def denormalize(self, samples: Array) -> Array:
        """Invert `normalize`."""
        return samples * _wide(self.deviation, samples) + _wide(self.mean, samples)


def _wide(moment: Array, samples: Array) -> Array:
    return jnp.expand_dims(moment, tuple(range(samples.ndim - moment.ndim)))


def start(shape: tuple[int, ...]) -> RunningStatistics:
    """Return the statistics of no samples, which change nothing."""
    return RunningStatistics(jnp.float32(0), jnp.zeros(shape, jnp.float32), jnp.ones(shape, jnp.float32))


Statistics = dict[str, RunningStatistics]


def update_statistics(
    statistics: Statistics, samples: dict[str, Array], weight: Array, layout: DataParallel
) -> Statistics:
    """Add samples [S local, m, ...] with weights float32[S local, m] to the statistics that are in use.

    Samples of weight 0 are not counted. Weights must have a mean of 1 over all samples. Instead of the axis m there may
    be several.
    """
    weight = weight.reshape(weight.shape[0], -1)
    weighted_mean = jax.vmap(lambda x: layout.sample_mean(weight * x), in_axes=-1)
    share_counted = layout.sample_mean((weight > 0).astype(jnp.float32))
    updated, count = dict(statistics), share_counted * (weight.shape[1] * layout.shards)
    for name, values in samples.items():
        if name in updated:
            rows, shape = values.reshape(*weight.shape, -1).astype(jnp.float32), updated[name].mean.shape
            mean = weighted_mean(rows)
            variance = weighted_mean(jnp.square(rows - mean[None, None])).reshape(shape)
            updated[name] = updated[name].merge(mean.reshape(shape), variance, count)
    return updated


def normalize_inputs(name: str, statistics: Statistics, inputs: Array) -> Array:
    """Return inputs float32[N, ...], normalised where there are statistics of them."""
    inputs = inputs.astype(jnp.float32)
    return jnp.clip(statistics[name].normalize(inputs), -INPUT_LIMIT, INPUT_LIMIT) if name in statistics else inputs
