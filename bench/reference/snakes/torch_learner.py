"""A plain PyTorch DDPG learner for snakes: the oracle of our update.

It follows the trainer of jidiai/Competition_3v3snakes: one actor and one critic shared by the team, the softmax vector
of the actor as a continuous action (Lillicrap et al. 2016, arXiv 1509.02971) from which the game's action is drawn.
BiCNet (Peng et al. 2017, arXiv 1703.10069) puts an LSTM over the snakes of a team after the first layer of both
networks.

PyTorch is imported when a learner is created. Letters: M steps of a batch, A snakes of a team, D values of an
observation, n actions.
"""

import math
from typing import TYPE_CHECKING, Any

from bench.reference.coverage.torch_learner import require_torch
from bench.reference.torch_learner import Batch, TorchLearner

if TYPE_CHECKING:
    import torch


def build_network(inputs: int, outputs: int, units: int = 256, bicnet: bool = False) -> "torch.nn.ModuleDict":
    """Layers of [.., A, inputs] -> [.., A, outputs]; the first one has no activation, as published. See `forward`."""
    nn = require_torch().nn
    layers = {"first": nn.Linear(inputs, units)}
    if bicnet:
        layers["team"] = nn.LSTM(units, units, batch_first=True, bidirectional=True)
    layers["second"] = nn.Linear(units * (1 + bicnet), units)
    return nn.ModuleDict(layers | {"last": nn.Linear(units, outputs)})


def forward(network: "torch.nn.ModuleDict", x: "torch.Tensor") -> "torch.Tensor":
    """[M, A, inputs] -> [M, A, outputs]."""
    x = network["first"](x)
    if "team" in network:
        x = network["team"](x)[0]
    return network["last"](network["second"](x).relu())


class TorchDdpg(TorchLearner):
    """Actor, critic and their targets.

    Args:
        inputs, actions: D, n.
        hidden_size: units of each hidden layer.
        bicnet: an LSTM mixes the snakes of a team.
        actor_lr, critic_lr: learning rates of the two Adam optimisers.
        gamma, tau: discount; share of the online networks in each update of the targets.
        expected: the critic gives a value for each action, of which the policy takes the mean (arXiv 1709.00503).
        entropy_weight, logit_weight: entropy bonus of the actor, cost of its squared logits.
        adam_epsilon: of both optimisers.
        max_grad_norm: gradients of each network are clipped to this Euclidean norm, 0 = never.
        seed: of the initial weights.
        device: of networks and updates, "cpu" or "cuda".
    """

    def __init__(
        self,
        inputs: int,
        actions: int = 4,
        hidden_size: int = 256,
        *,
        bicnet: bool = False,
        expected: bool = False,
        entropy_weight: float = 0.0,
        logit_weight: float = 0.0,
        adam_epsilon: float = 1e-8,
        actor_lr: float = 1e-4,
        critic_lr: float = 1e-4,
        gamma: float = 0.95,
        tau: float = 0.001,
        max_grad_norm: float = 1.0,
        seed: int = 0,
        device: str = "cpu",
    ):
        super().__init__(device)
        self.gamma = gamma
        self.tau = tau
        self.max_grad_norm = max_grad_norm
        self.expected = expected
        self.entropy_weight = entropy_weight
        self.logit_weight = logit_weight
        with self.torch.random.fork_rng(devices=[]):
            self.torch.manual_seed(seed)
            networks = (build_network(inputs, actions, hidden_size, bicnet) for _ in range(2))
            self.actor, self.target_actor = (network.to(device) for network in networks)
            sizes = (inputs, actions) if expected else (inputs + actions, 1)
            networks = (build_network(*sizes, hidden_size, bicnet) for _ in range(2))
            self.critic, self.target_critic = (network.to(device) for network in networks)
        self.target_actor.load_state_dict(self.actor.state_dict())
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.actor_adam = self.torch.optim.Adam(self.actor.parameters(), lr=actor_lr, eps=adam_epsilon)
        self.critic_adam = self.torch.optim.Adam(self.critic.parameters(), lr=critic_lr, eps=adam_epsilon)

    def update(self, batch: Batch) -> dict[str, float]:
        """Update critic, then actor, then both targets.

        Args:
            batch: float32 arrays observation and next [M, A, D], vector [M, A, n], reward [M, A], done [M]; and, if
                they are there, discount [M] of the next value instead of gamma (1 - done); weight [M] of each
                step for the critic, where the actor skips those with 0; mask and next_mask [M, A, n], 1 where an
                action is open. With `expected`, vector is 1 at the action taken.

        Returns:
            critic_loss, actor_loss, critic_grad_norm and actor_grad_norm (before clipping), target_mean.
        """
        observation, vector, reward, following, done = (
            self.tensor(batch[name]) for name in ("observation", "vector", "reward", "next", "done")
        )
        mask, next_mask = (self.tensor(batch[name]) if name in batch else None for name in ("mask", "next_mask"))
        discount = self.tensor(batch["discount"]) if "discount" in batch else self.gamma * (1 - done)
        weight = self.tensor(batch["weight"]) if "weight" in batch else self.torch.ones_like(done)
        with self.torch.no_grad():
            policy = self.policy(self.target_actor, following, next_mask)
            target = reward + discount[:, None] * self.value(self.target_critic, following, policy)
        critic_loss = (weight[:, None] * (target - self.value(self.critic, observation, vector)) ** 2).mean()
        critic_norm = self._descend(self.critic, self.critic_adam, critic_loss)
        used = (weight > 0).float()[:, None]
        logits = forward(self.actor, observation)
        policy = self.softmax(logits, mask)
        actor_loss = -(used * self.value(self.critic, observation, policy)).mean()
        if self.entropy_weight:
            log_policy = self.torch.log_softmax(logits if mask is None else logits.masked_fill(mask == 0, -1e9), -1)
            actor_loss = actor_loss + self.entropy_weight * (used * (policy * log_policy).sum(-1)).mean()
        if self.logit_weight:
            actor_loss = actor_loss + self.logit_weight * (used[..., None] * logits.square()).mean()
        actor_norm = self._descend(self.actor, self.actor_adam, actor_loss)
        self.soft_update(self.target_actor, self.actor, self.tau)
        self.soft_update(self.target_critic, self.critic, self.tau)
        return {
            "critic_loss": critic_loss.item(),
            "actor_loss": actor_loss.item(),
            "critic_grad_norm": critic_norm,
            "actor_grad_norm": actor_norm,
            "target_mean": target.mean().item(),
        }

    def policy(
        self, actor: "torch.nn.ModuleDict", observation: "torch.Tensor", mask: "torch.Tensor | None" = None
    ) -> "torch.Tensor":
        """[M, A, D] -> softmax vectors [M, A, n], of the open actions if there is a mask of them."""
        return self.softmax(forward(actor, observation), mask)

    def softmax(self, logits: "torch.Tensor", mask: "torch.Tensor | None") -> "torch.Tensor":
        """Return `policy` for logits."""
        return self.torch.softmax(logits if mask is None else logits.masked_fill(mask == 0, -1e9), -1)

    def value(
        self, critic: "torch.nn.ModuleDict", observation: "torch.Tensor", vector: "torch.Tensor"
    ) -> "torch.Tensor":
        """[M, A, D], [M, A, n] -> [M, A]."""
        if self.expected:
            return (vector * forward(critic, observation)).sum(-1)
        return forward(critic, self.torch.cat([observation, vector], -1))[..., 0]

    def _descend(self, network: "torch.nn.ModuleDict", adam: Any, loss: "torch.Tensor") -> float:
        adam.zero_grad()
        loss.backward()
        norm = self.torch.nn.utils.clip_grad_norm_(network.parameters(), self.max_grad_norm or math.inf)
        adam.step()
        return float(norm)
