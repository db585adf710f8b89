"""A plain PyTorch COMA learner for the coverage missions of `oracle`: the baseline for training speed and results.

One actor and one critic shared by the team, with the network of the public code of Westheider et al. (arXiv
2303.01150, `dmar-bonn/ipp-marl`): three valid convolutions that take 11 x 11 to 1 x 1, then two linear layers. The
critic returns a value for every own action given the actions of the others, which gives the counterfactual advantage of
COMA (Foerster et al. 2018, arXiv 1705.08926). A training step runs some missions one at a time, builds TD(lambda)
targets once, and makes several epochs over shuffled minibatches: the critic over all of them, then the actor over the
same ones.

PyTorch is imported when a learner is created. Letters: K transitions of one agent in a row (several missions), N
agents, A actions, S = K N samples, flat index k N + agent."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.reference.coverage.oracle import LATTICE, Mission, Settings, td_targets, td_targets_original

if TYPE_CHECKING:
    import torch

ACTOR_CHANNELS = 7
CRITIC_CHANNELS = 12
ACTOR_LOSSES = ("masked", "original")
TD_TARGETS = ("td_lambda", "original")

Batch = dict[str, Any]


def require_torch() -> Any:
    """Return the module torch; the error tells how to install it."""
    try:
        import torch
    except ImportError as error:
        raise ImportError("The PyTorch baseline needs PyTorch: pip install -e '.[torch]'.") from error
    return torch


def build_network(channels: int, num_actions: int, width: int = 256) -> "torch.nn.Sequential":
    """[B, channels, 11, 11] float32 to [B, A]: convolutions 5 x 5, 4 x 4, 4 x 4, two linear layers, ReLU between.

    Every weight and bias starts uniform in +/- 1 / sqrt(fan-in), which is PyTorch's default.
    """
    nn = require_torch().nn
    return nn.Sequential(
        *(nn.Conv2d(channels, width, 5), nn.ReLU()),
        *(nn.Conv2d(width, width, 4), nn.ReLU()),
        *(nn.Conv2d(width, width, 4), nn.ReLU()),
        nn.Flatten(),
        *(nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, num_actions),
    )


def epsilon(mission: int, eps_max: float = 0.5, eps_min: float = 0.02, anneal: int = 10_000) -> float:
    """Exploration of mission number 1, 2, ...: linear from eps_max to eps_min over `anneal` missions."""
    return eps_max - (eps_max - eps_min) * min(mission, anneal) / anneal


class TorchComa:
    """Actor, critic and target critic with their updates.

    Args:
        num_agents: N.
        num_actions: A.
        hidden_size: features of every hidden layer.
        actor_lr, critic_lr: learning rates of the two Adam optimisers.
        gamma, lam: discount and lambda of the targets.
        num_minibatches: per pass over the data; a remainder is dropped, drawn anew in every pass.
        num_epochs: passes over the data of a training step.
        target_update_period: the target critic is refreshed in every training step (from 0) divisible by this.
        tau: if given, the target critic is updated at this rate before every pass instead.
        actor_loss: "masked": gradient of the masked policy that is sampled; "original": unmasked log-probability,
            weighted by the share of allowed actions.
        td_target: "td_lambda", or "original" for what the original system computes (its target critic stays as made).
        actor_epochs: the last this many passes also train the actor; 0 = all.
        dueling: the critic's output is a value and mean-free action values (arXiv 1511.06581).
        clip_ratio: of the clipped surrogate (arXiv 1707.06347, equation 7); 0 = no ratio.
        advantage: "critic", or "return" for the target instead of the critic's value of the action taken, with the
            baseline of the critic before the training step.
        scale_advantage: divide advantages by their standard deviation over the minibatch.
        adam_epsilon: of both optimisers.
        device: "cpu", "cuda", ...
        seed: of the initial weights, of `act` and of shuffling.
    """

    def __init__(
        self,
        num_agents: int,
        num_actions: int,
        hidden_size: int = 256,
        *,
        actor_lr: float = 1e-5,
        critic_lr: float = 1e-4,
        gamma: float = 0.99,
        lam: float = 0.8,
        num_minibatches: int = 5,
        num_epochs: int = 5,
        target_update_period: int = 10,
        tau: float | None = None,
        actor_loss: str = "masked",
        td_target: str = "td_lambda",
        actor_epochs: int = 0,
        dueling: bool = False,
        clip_ratio: float = 0.0,
        advantage: str = "critic",
        scale_advantage: bool = False,
        adam_epsilon: float = 1e-8,
        device: str = "cpu",
        seed: int = 0,
    ):
        if actor_loss not in ACTOR_LOSSES:
            raise ValueError(f"unknown actor_loss {actor_loss!r}; use one of {ACTOR_LOSSES}.")
        if td_target not in TD_TARGETS:
            raise ValueError(f"unknown td_target {td_target!r}; use one of {TD_TARGETS}.")
        self.torch = require_torch()
        self.num_agents = num_agents
        self.num_actions = num_actions
        self.device = device
        self.gamma = gamma
        self.lam = lam
        self.num_minibatches = num_minibatches
        self.num_epochs = num_epochs
        self.target_update_period = target_update_period
        self.tau = tau
        self.actor_loss = actor_loss
        self.td_target = td_target
        self.actor_epochs = actor_epochs or num_epochs
        self.dueling = dueling
        self.clip_ratio = clip_ratio
        self.worth = advantage
        self.scale_advantage = scale_advantage
        self.rng = np.random.default_rng(seed)
        with self.torch.random.fork_rng(devices=[]):
            self.torch.manual_seed(seed)
            self.actor = build_network(ACTOR_CHANNELS, num_actions, hidden_size).to(device)
            self.critic, self.target_critic = (
                build_network(CRITIC_CHANNELS, num_actions + dueling, hidden_size).to(device) for _ in range(2)
            )
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.actor_optimizer = self.torch.optim.Adam(self.actor.parameters(), lr=actor_lr, eps=adam_epsilon)
        self.critic_optimizer = self.torch.optim.Adam(self.critic.parameters(), lr=critic_lr, eps=adam_epsilon)
        self.training_steps = 0
        self.entropy_weight = 0.0

    # ---- acting

    def policy(self, images: "torch.Tensor", eps: float) -> "torch.Tensor":
        """[B, C, 11, 11] to probabilities [B, A]: softmax mixed with the uniform distribution, no mask."""
        return self.mix(self.actor(images), eps)

    def mix(self, logits: "torch.Tensor", eps: float) -> "torch.Tensor":
        """Return `policy` for logits [B, A]."""
        return (1.0 - eps) * self.torch.softmax(logits, dim=-1) + eps / self.num_actions

    def values(self, critic: "torch.nn.Module", states: "torch.Tensor") -> "torch.Tensor":
        """[B, C, 11, 11] to a value for every action, [B, A]."""
        q = critic(states)
        return q[:, :1] + q[:, 1:] - q[:, 1:].mean(dim=1, keepdim=True) if self.dueling else q

    def probabilities(self, obs: np.ndarray, eps: float = 0.0) -> np.ndarray:
        """[N, 11, 11, 7] float32 observations to unmasked probabilities [N, A] float32."""
        with self.torch.no_grad():
            return self.policy(self._images(obs), eps).cpu().numpy()

    def choose(self, probabilities: np.ndarray, mask: np.ndarray, greedy: bool = False) -> int:
        """One action from unmasked probabilities [A] and a mask [A]."""
        allowed = probabilities * mask
        if greedy:
            return int(allowed.argmax())
        total = np.cumsum(allowed, dtype=np.float64)
        return min(int(np.searchsorted(total, self.rng.random() * total[-1], side="right")), len(allowed) - 1)

    def fly_step(
        self, mission: Mission, obs: np.ndarray, eps: float = 0.0, greedy: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Actions [N] and masks [N, A] for the present step of a mission, agents in order."""
        probabilities = self.probabilities(obs, eps)
        return mission.act(lambda agent, mask: self.choose(probabilities[agent], mask, greedy))

    # ---- learning

    def train_step(self, batch: Batch) -> dict[str, float]:
        """One training step on the missions of `batch`, see `collect` for its entries.

        Optional entries: log_prob [K, N], of the actions when they were chosen, and
        entropy_weight, of the entropy of the masked policy without exploration.

        Returns:
            critic_loss, actor_loss, advantage_mean, advantage_std, log_prob: means over the minibatches of all passes.
        """
        data = self.build_run(batch)
        if self.td_target == "td_lambda" and self.tau is None and self.training_steps % self.target_update_period == 0:
            self.target_critic.load_state_dict(self.critic.state_dict())
        if self.worth == "return":
            with self.torch.no_grad():
                data["values"] = self.values(self.critic, data["state"])
        records: list[dict[str, float]] = []
        for epoch in range(self.num_epochs):
            self._follow()
            order = self.rng.permutation(len(data["action"]))
            size = len(order) // self.num_minibatches
            index = order[: size * self.num_minibatches].reshape(self.num_minibatches, size)
            self.entropy_weight = float(batch.get("entropy_weight", 0.0))
            train_actor = epoch >= self.num_epochs - self.actor_epochs
            records += self.data_pass(data, index, float(batch["eps"]), train_actor)
        self.training_steps += 1
        return {name: float(np.mean([row[name] for row in records if name in row])) for name in records[-1]}

    def build_run(self, batch: Batch) -> dict[str, "torch.Tensor"]:
        """Return a batch as tensors with a flat axis of S samples: obs, state [S, C, 11, 11], action, mask, target."""
        num_samples = np.asarray(batch["action"]).size
        state = np.asarray(batch["state"], dtype=np.float32)
        obs = np.asarray(batch["obs"], dtype=np.float32)
        images = self._images(state.reshape(num_samples, LATTICE, LATTICE, CRITIC_CHANNELS))
        target = self.targets(batch, self.target_values(images, batch["action"]))
        tensors = {}
        if "log_prob" in batch:
            tensors["log_prob"] = self._tensor(np.asarray(batch["log_prob"], dtype=np.float32).reshape(-1))
        return tensors | {
            "obs": self._images(obs.reshape(num_samples, LATTICE, LATTICE, ACTOR_CHANNELS)),
            "state": images,
            "action": self._tensor(np.asarray(batch["action"], dtype=np.int64).reshape(-1)),
            "mask": self._tensor(np.asarray(batch["mask"], dtype=np.float32).reshape(num_samples, -1)),
            "target": self._tensor(target.astype(np.float32).reshape(-1)),
        }

    def target_values(self, states: "torch.Tensor", action: np.ndarray) -> np.ndarray:
        """[K, N] float64: the target critic's value of the action taken in each state [S, C, 11, 11]."""
        with self.torch.no_grad():
            q = np.concatenate([self.values(self.target_critic, part).cpu().numpy() for part in states.split(1024)])
        action = np.asarray(action, dtype=np.int64)
        return np.take_along_axis(q.reshape(*action.shape, -1), action[..., None], -1)[..., 0].astype(np.float64)

    def targets(self, batch: Batch, values: np.ndarray) -> np.ndarray:
        """[K, N] float64: targets of every agent's row from the target critic's values [K, N]."""
        reward = np.asarray(batch["reward"], np.float64)
        done = np.asarray(batch["done"], np.float64)
        columns = []
        for q in values.T:
            if self.td_target == "td_lambda":
                columns.append(td_targets(reward, done, q, self.gamma, self.lam))
            else:
                columns.append(td_targets_original(reward, done, q, self.gamma, self.lam)[0])
        return np.stack(columns, axis=1)

    def data_pass(
        self, data: dict[str, "torch.Tensor"], index: np.ndarray, eps: float, train_actor: bool = True
    ) -> list[dict[str, float]]:
        """Train the critic on all minibatches [M, size] of flat indices, then the actor; return a record of each."""
        minibatches = [{name: values[self._tensor(rows)] for name, values in data.items()} for rows in index]
        records = []
        values = []
        for minibatch in minibatches:
            loss, q = self.critic_update(minibatch)
            records.append({"critic_loss": loss})
            values.append(minibatch.get("values", q))
        for record, minibatch, q in zip(records, minibatches, values, strict=True) if train_actor else ():
            record.update(self.actor_update(minibatch, q, eps))
        return records

    def critic_update(self, minibatch: dict[str, "torch.Tensor"]) -> tuple[float, "torch.Tensor"]:
        """Make one Adam step on the mean squared error of the taken action's value.

        Returns:
            The loss, and the values [size, A] on the minibatch after the step, which serve the actor.
        """
        q = self.values(self.critic, minibatch["state"])
        q_taken = q.gather(1, minibatch["action"][:, None])[:, 0]
        loss = ((q_taken - minibatch["target"]) ** 2).mean()
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        with self.torch.no_grad():
            return loss.item(), self.values(self.critic, minibatch["state"])

    def actor_update(self, minibatch: dict[str, "torch.Tensor"], q: "torch.Tensor", eps: float) -> dict[str, float]:
        """Make one Adam step on the policy gradient with the counterfactual advantage from values q [size, A]."""
        action = minibatch["action"][:, None]
        mask = minibatch["mask"]
        logits = self.actor(minibatch["obs"])
        pi = self.mix(logits, eps)
        masked = self.masked(pi, mask)
        advantage = self.advantage(masked.detach(), q, minibatch)
        scaled = advantage / advantage.std(unbiased=False) if self.scale_advantage else advantage
        if self.actor_loss == "original":
            log_prob = pi.gather(1, action)[:, 0].log()
            loss = -(advantage * log_prob * mask.mean(dim=1)).mean()
        else:
            log_prob = (masked.gather(1, action)[:, 0] + 1e-8).log()
            gain = scaled * log_prob
            if self.clip_ratio:
                ratio = (log_prob - minibatch["log_prob"]).exp()
                bounded = ratio.clamp(1 - self.clip_ratio, 1 + self.clip_ratio)
                gain = self.torch.minimum(ratio * scaled, bounded * scaled)
            loss = -gain.mean()
        if self.entropy_weight:
            log_policy = self.torch.log_softmax(logits.masked_fill(mask == 0, -1e9), dim=-1)
            loss = loss + self.entropy_weight * (log_policy.exp() * log_policy).sum(dim=1).mean()
        self.actor_optimizer.zero_grad()
        loss.backward()
        self.actor_optimizer.step()
        return {
            "actor_loss": loss.item(),
            "advantage_mean": advantage.mean().item(),
            "advantage_std": advantage.std().item(),
            "log_prob": log_prob.mean().item(),
        }

    def masked(self, pi: "torch.Tensor", mask: "torch.Tensor") -> "torch.Tensor":
        """The policy that is sampled, [B, A]: unmasked probabilities times mask, divided by their sum."""
        allowed = pi * mask
        return allowed / allowed.sum(dim=1, keepdim=True).clamp(min=1e-5)

    def advantage(
        self, masked: "torch.Tensor", q: "torch.Tensor", minibatch: dict[str, "torch.Tensor"]
    ) -> "torch.Tensor":
        """[B]: value of the action minus the mean value under the masked policy (bounded below by 1e-5)."""
        value = q.gather(1, minibatch["action"][:, None])[:, 0] if self.worth == "critic" else minibatch["target"]
        return value - (masked.clamp(min=1e-5) * q * minibatch["mask"]).sum(dim=1)

    def _follow(self) -> None:
        """Update the target critic softly, if `tau` is given."""
        if self.tau is None or self.td_target == "original":
            return
        with self.torch.no_grad():
            for slow, fast in zip(self.target_critic.parameters(), self.critic.parameters(), strict=True):
                slow.lerp_(fast, self.tau)

    # ---- parameters and tensors

    def set_parameters(self, network: str, arrays: list[np.ndarray]) -> None:
        """Load weight and bias of each layer, in order, into "actor", "critic" or "target_critic"; PyTorch's layout."""
        with self.torch.no_grad():
            for parameter, array in zip(getattr(self, network).parameters(), arrays, strict=True):
                parameter.copy_(self._tensor(np.asarray(array)))

    def _images(self, array: np.ndarray) -> "torch.Tensor":
        """[B, 11, 11, C] to a tensor [B, C, 11, 11] on the device."""
        return self._tensor(np.asarray(array, dtype=np.float32)).permute(0, 3, 1, 2).contiguous()

    def _tensor(self, array: np.ndarray) -> "torch.Tensor":
        return self.torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


# ---------------------------------------------------------------- data and training loop


def collect(
    learner: TorchComa, settings: Settings, rng: np.random.Generator, missions: int, eps: float
) -> tuple[Batch, dict[str, float]]:
    """Run missions one after another.

    Returns:
        The batch: obs [K, N, 11, 11, 7], state [K, N, 11, 11, 12] float32, action [K, N] int64, mask [K, N, A] bool,
        reward [K], done [K] float64 (1 at the last step of a mission), eps; K = missions * T. And means over the
        missions: return and every metric at the end.
    """
    rows: dict[str, list[Any]] = {name: [] for name in ("obs", "state", "action", "mask", "reward", "done")}
    ends = []
    for _ in range(missions):
        mission = Mission(settings, rng)
        first = len(rows["reward"])
        while not mission.done:
            obs = mission.observe()
            action, mask = learner.fly_step(mission, obs, eps)
            state = mission.critic_state(action, obs)
            reward, done = mission.step(action)
            for name, value in zip(rows, (obs, state, action, mask, reward, float(done)), strict=True):
                rows[name].append(value)
        ends.append({"return": float(np.sum(rows["reward"][first:])), **mission.metrics()})
    batch: Batch = {name: np.stack(values) for name, values in rows.items()}
    batch["eps"] = eps
    return batch, {name: float(np.mean([end[name] for end in ends])) for name in ends[0]}


def training(
    learner: TorchComa, settings: Settings, missions_per_step: int = 50, seed: int = 0
) -> Iterator[dict[str, float]]:
    """Train forever; yields losses and mean mission metrics of each training step.

    `itertools.islice(training(...), 1500)` makes the published number of steps.
    """
    rng = np.random.default_rng(seed)
    for step in itertools.count():
        batch, stats = collect(learner, settings, rng, missions_per_step, epsilon((step + 1) * missions_per_step))
        yield {"missions": float((step + 1) * missions_per_step), **stats, **learner.train_step(batch)}
