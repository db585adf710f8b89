"""Base of PyTorch learners with a replay: a ring of steps on the host, and parameters as arrays.

PyTorch is imported when a learner is created. Letter: M steps of a batch.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.reference.coverage.torch_learner import require_torch

if TYPE_CHECKING:
    import torch

Batch = Mapping[str, np.ndarray]


def window_return(reward: np.ndarray, end: np.ndarray, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    """Compute n-step returns, which stop at the first end, and the discount of the value after them.

    Args:
        reward: [M, n, ...] of the steps.
        end: [M, n], 0 where the episode goes on, 1 where it terminated, 2 where it was cut.
        gamma: discount.

    Returns:
        float32[M, ...] and float32[M].
    """
    returns = np.zeros_like(reward[:, 0], dtype=np.float64)
    discounts = np.ones(len(end))
    for row in range(len(end)):
        for step, code in enumerate(end[row]):
            returns[row] += discounts[row] * reward[row, step]
            discounts[row] *= 0 if code == 1 else gamma
            if code:
                break
    return returns.astype(np.float32), discounts.astype(np.float32)


class ReplayLearner:
    """A replay, and conversions of arrays for networks.

    Args:
        shapes: of the arrays of a step, by name.
        buffer_size: steps that the replay holds.
        seed: of acting and of batches.
        device: of networks and updates, "cpu" or "cuda"; the replay is on the host.

    Attributes:
        torch: the package.
        rng: of acting and of batches.
        replay: float32[buffer_size, ...] by the names of `shapes`.
        stored: steps so far, overwritten ones included.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], buffer_size: int, seed: int, device: str = "cpu") -> None:
        self.torch = require_torch()
        self.device = device
        self.rng = np.random.default_rng(seed)
        self.replay = {name: np.zeros((buffer_size, *shape), np.float32) for name, shape in shapes.items()}
        self.stored = 0

    @property
    def filled(self) -> int:
        return min(self.stored, len(next(iter(self.replay.values()))))

    def remember(self, **step: Any) -> None:
        """Store a step, one array for each name; overwrites the oldest."""
        for name, buffer in self.replay.items():
            buffer[self.stored % len(buffer)] = step[name]
        self.stored += 1

    def draw(self, count: int, replace: bool) -> Batch:
        """Draw a batch [M, ...] of stored steps uniformly."""
        rows = self.rng.choice(self.filled, count, replace=replace)
        return {name: buffer[rows] for name, buffer in self.replay.items()}

    def set_parameters(self, network: str, arrays: Sequence[np.ndarray]) -> None:
        """Load the attribute of that name, such as "actor": its parameters in PyTorch's order and layout.

        Matrices are (out, in); an LSTM has weight_ih, weight_hh, bias_ih, bias_hh, forward, then back.
        """
        with self.torch.no_grad():
            for parameter, array in zip(getattr(self, network).parameters(), arrays, strict=True):
                parameter.copy_(self.tensor(np.array(array)))

    def tensor(self, array: np.ndarray) -> "torch.Tensor":
        """float32 of the same shape, on the device."""
        return self.torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).to(self.device)

    def soft_update(self, target: Any, network: Any, tau: float) -> None:
        """Move the parameters of `target` towards `network` by the share tau."""
        with self.torch.no_grad():
            for old, new in zip(target.parameters(), network.parameters(), strict=True):
                old.lerp_(new, tau)
