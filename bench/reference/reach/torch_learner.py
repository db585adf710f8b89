"""A plain PyTorch SAC learner for one arm: the oracle of our update.

It follows the worker of the collective-learning pipeline for Meta-World, with one task: soft actor-critic (Haarnoja et
al. 2018, arXiv 1812.05905) with twin critics and a learned temperature. Episodes are only truncated, so that every step
bootstraps.

PyTorch is imported when a learner is created. Letters: M steps of a batch, D values of an observation, n numbers of an
action.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.reference.coverage.torch_learner import require_torch
from bench.reference.torch_learner import Batch, TorchLearner

if TYPE_CHECKING:
    import torch


def build_network(inputs: int, outputs: int, units: int = 256, layer_norm: bool = False) -> "torch.nn.Sequential":
    """Two hidden layers, [M, inputs] -> [M, outputs]; matrices Glorot uniform, biases zero."""
    nn = require_torch().nn
    layers: list[Any] = []
    for size in (inputs, units):
        layers += [nn.Linear(size, units), *([nn.LayerNorm(units, eps=1e-6)] if layer_norm else []), nn.ReLU()]
    layers.append(nn.Linear(units, outputs))
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class TorchSac(TorchLearner):
    """Actor, two critics and their targets, and a temperature.

    Args:
        inputs, actions: D, n.
        hidden_size: units of each of two hidden layers.
        layer_norm: before each ReLU of the critics.
        actor_lr, critic_lr, alpha_lr: learning rates of the three Adam optimisers.
        adam_epsilon: of all three.
        gamma, tau: discount; share of the critics in each update of their targets.
        initial_alpha, target_entropy: initial temperature; target of the entropy.
        tasks: number of tasks, each with a temperature of its own.
        actor_update_period, target_update_period: updates per step of actor and temperature, and of the targets.
        seed: of the initial weights.
        device: of networks and updates, "cpu" or "cuda".
    """

    def __init__(
        self,
        inputs: int,
        actions: int,
        hidden_size: int = 256,
        *,
        layer_norm: bool = False,
        actor_lr: float = 3e-4,
        critic_lr: float = 3e-4,
        alpha_lr: float = 1e-4,
        adam_epsilon: float = 1e-8,
        gamma: float = 0.99,
        tau: float = 0.005,
        initial_alpha: float = 1.0,
        target_entropy: float = -4.0,
        tasks: int = 1,
        actor_update_period: int = 1,
        target_update_period: int = 2,
        seed: int = 0,
        device: str = "cpu",
    ):
        super().__init__(device)
        self.gamma = gamma
        self.tau = tau
        self.target_entropy = target_entropy
        self.actor_update_period = actor_update_period
        self.target_update_period = target_update_period
        self.updates = 0
        nn = self.torch.nn
        optim = self.torch.optim
        with self.torch.random.fork_rng(devices=[]):
            self.torch.manual_seed(seed)
            self.actor = build_network(inputs, 2 * actions, hidden_size).to(device)
            self.critic, self.target_critic = (
                nn.ModuleList([build_network(inputs + actions, 1, hidden_size, layer_norm) for _ in range(2)]).to(
                    device
                )
                for _ in range(2)
            )
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.log_alpha = self.torch.full((tasks,), math.log(initial_alpha), device=device, requires_grad=True)
        self.actor_adam = optim.Adam(self.actor.parameters(), lr=actor_lr, eps=adam_epsilon)
        self.critic_adam = optim.Adam(self.critic.parameters(), lr=critic_lr, eps=adam_epsilon)
        self.alpha_adam = optim.Adam([self.log_alpha], lr=alpha_lr, eps=adam_epsilon)

    # ---- acting

    def sample(self, observation: "torch.Tensor", noise: "torch.Tensor") -> tuple["torch.Tensor", "torch.Tensor"]:
        """Actions [M, n] for normal noise [M, n], and their log-densities [M]."""
        torch = self.torch
        mean, raw = self.actor(observation).chunk(2, dim=-1)
        log_std = -20 + 11 * (torch.tanh(raw) + 1)
        action = torch.tanh(mean + log_std.exp() * noise)
        normal = -noise.square() / 2 - log_std - math.log(2 * math.pi) / 2
        return action, (normal - torch.log(torch.relu(1 - action.square()) + 1e-6)).sum(-1)

    # ---- learning

    def update(self, batch: Batch, noise: np.ndarray) -> dict[str, float]:
        """Update the critics; actor and temperature, and targets, where due.

        Args:
            batch: float32 arrays observation and next [M, D], action [M, n], reward [M]; and, if they are there,
                discount [M] of the next value instead of gamma; weight [M] of each step for the critics,
                where the actor skips those with 0; task int64[M].
            noise: normal numbers [M, 2, n] of the next actions and of the actor's.

        Returns:
            critic_loss and target_mean; actor_loss and policy_entropy, where the actor was due; alpha.
        """
        torch = self.torch
        observation, action, reward, following = (
            self.tensor(batch[name]) for name in ("observation", "action", "reward", "next")
        )
        discount, weight = (
            self.tensor(batch[name]) if name in batch else torch.full_like(reward, default)
            for name, default in (("discount", self.gamma), ("weight", 1.0))
        )
        drawn = self.tensor(noise)
        with torch.no_grad():
            task = torch.from_numpy(batch["task"] if "task" in batch else np.zeros(len(reward), np.int64)).to(
                self.device
            )
            alpha = self.log_alpha.exp()[task]
            next_action, log_prob = self.sample(following, drawn[:, 0])
            value = self.values(self.target_critic, following, next_action).amin(0) - alpha * log_prob
            target = reward + discount * value
        error = self.values(self.critic, observation, action) - target
        critic_loss = (weight * error.square()).mean(1).sum()
        self._descend(self.critic_adam, critic_loss)
        metrics = {"critic_loss": critic_loss.item(), "target_mean": target.mean().item()}
        if self.updates % self.actor_update_period == 0:
            metrics |= self._actor_step(observation, drawn[:, 1], task, (weight > 0).float())
        if self.updates % self.target_update_period == 0:
            self.soft_update(self.target_critic, self.critic, self.tau)
        self.updates += 1
        return metrics | {"alpha": self.log_alpha.exp().mean().item()}

    def _actor_step(
        self, observation: "torch.Tensor", noise: "torch.Tensor", task: "torch.Tensor", used: "torch.Tensor"
    ) -> dict[str, float]:
        self.critic.requires_grad_(False)  # their gradients are not used
        action, log_prob = self.sample(observation, noise)
        alpha = self.log_alpha.exp()[task]
        value = self.values(self.critic, observation, action).amin(0)
        actor_loss = (used * (alpha.detach() * log_prob - value)).mean()
        self._descend(self.actor_adam, actor_loss)
        self.critic.requires_grad_(True)
        log_prob = log_prob.detach()
        self._descend(self.alpha_adam, (used * alpha * (-log_prob - self.target_entropy)).mean())
        return {"actor_loss": actor_loss.item(), "policy_entropy": -(used * log_prob).mean().item()}

    def values(
        self, critics: "torch.nn.ModuleList", observation: "torch.Tensor", action: "torch.Tensor"
    ) -> "torch.Tensor":
        """Q of both critics, [2, M]."""
        inputs = self.torch.cat([observation, action], -1)
        return self.torch.stack([critic(inputs)[:, 0] for critic in critics])

    def _descend(self, adam: Any, loss: "torch.Tensor") -> None:
        adam.zero_grad()
        loss.backward()
        adam.step()
