"""Base of PyTorch learners from batches of a replay, and their n-step returns.

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


class TorchLearner:
    """Conversions of arrays for networks, which are on the `device`, "cpu" or "cuda"."""

    def __init__(self, device: str = "cpu") -> None:
        self.torch = require_torch()
        self.device = device

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
