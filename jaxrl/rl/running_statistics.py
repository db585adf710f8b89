"""Running mean and variance of observations or returns, to normalise them."""

import jax.numpy as jnp

from envs_jax.base import Array, pytree


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
        """Return the standard deviation float32[...], at least 1e-4."""
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
