"""DDPG for teams with discrete actions, as in the 3v3 snakes baseline, with BiCNet and modern options.

Lillicrap et al. 2016, "Continuous control with deep reinforcement learning" (arXiv 1509.02971), in the form of
jidiai/Competition_3v3snakes: the softmax vector of the actor is the continuous action that critic and replay see, the
environment gets an action drawn from it. Weights are shared by all agents; critics are local, unless BiCNet (Peng et
al. 2017, arXiv 1703.10069) mixes the agents. Defaults are the published settings. Losses on top, the algorithm below.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from envs_jax.base import Array, Box, Discrete, EnvSpec, TimeStep, independent_mask, pytree
from jaxrl import distributions, nets, optimise, replay
from jaxrl.algos.base import Algorithm, AlgoState, Mode, Phase, Progress, Trajectory, setting, total
from jaxrl.replay import Marks, Replay

METRICS = (
    *("critic_loss", "critic_grad_norm", "actor_loss", "actor_grad_norm", "target_mean", "q_mean"),
    "policy_entropy",
)  # of every update

# Layout letters besides T, B, A, S: N samples, C critics, n actions, m samples of one logical shard.


def critic_loss(values: Array, target: Array, weight: Array) -> Array:
    """Mean of (y - Q)^2, summed over critics (arXiv 1509.02971, algorithm 1).

    values [C, N, A], target [N, A], weight [N].
    """
    return jnp.sum(jnp.mean(weight[None, :, None] * jnp.square(target[None] - values), axis=(1, 2)))


def expected_value(policy: Array, values: Array) -> Array:
    """Sum over actions of pi(a) Q(a), [..., n] -> [...]; its gradient by pi is that of all actions at once.

    References:
        Asadi et al. 2017, "Mean Actor-Critic", arXiv 1709.00503, equation 4.
    """
    return jnp.sum(policy * values, axis=-1)


def masked_softmax(logits: Array, mask: Array | None) -> Array:
    """Softmax over open actions (arXiv 2006.14171); logits float32[..., n], mask bool[..., n] or None."""
    return jax.nn.softmax(logits if mask is None else jnp.where(mask, logits, -1e9))


def relaxed_one_hot(logits: Array, noise: Array, temperature: float) -> Array:
    """softmax((logits + Gumbel noise) / temperature), [..., n]: a differentiable stand-in for a drawn action.

    References:
        Jang et al. 2017, arXiv 1611.01144, equation 2; Maddison et al. 2017, arXiv 1611.00712.
    """
    return jax.nn.softmax((logits + noise) / temperature)


@pytree
class DdpgParameters:
    """Parameters and optimisers, the same on every device; leaves of critics are [C, ...], of optimisers [P].

    Between updates of one call of `learn` every network is one vector [P], see `Ddpg.pack`.
    """

    actor: Any
    critic: Any
    target_actor: Any
    target_critic: Any
    actor_optimiser: Any
    critic_optimiser: Any


@dataclasses.dataclass(frozen=True)
class Ddpg(Algorithm):
    """Deep deterministic policy gradients with a replay, for discrete actions."""

    meaning: ClassVar[tuple[str, ...]] = ("scale_observation", "first_layer")

    update_interval: int = setting(1, "steps of every environment between calls of learn, which makes updates in a row")
    updates_per_step: float = setting(1.0, "gradient updates per step of the batch of environments")
    batch_size: int = setting(64, "stored steps per update, drawn with replacement; each holds all agents")
    buffer_size: int = setting(100_000, "environment steps that the replay holds, all environments together")
    buffer_gb: float = setting(0.0, "size of the replay in GB over all devices, instead of buffer_size; 0 = not used")
    replay_dtype: Literal["auto", "float16", "float32"] = setting(
        "auto", "of replayed float observations; auto = float16 where they lie in [0, 1], else their own"
    )
    warmup: int = setting(0, "stored steps before the first update; 0 = batch_size")
    prioritised: bool = setting(
        False, "draw by the size of the last error (arXiv 1511.05952), in each logical shard, instead of uniformly"
    )
    priority_alpha: float = setting(0.6, "exponent of priorities")
    priority_beta: float = setting(0.4, "correction of unequal chances at the start; 1 at the run's total")
    n_step: int = setting(1, "rewards before the bootstrap (arXiv 1804.08617)")
    gamma: float = setting(0.95, "discount")
    tau: float = setting(0.001, "share of the online networks in each soft update of the targets")
    actor_lr: float = setting(1e-4, "learning rate of the actor (Adam)")
    critic_lr: float = setting(1e-4, "learning rate of the critic (Adam)")
    adam_epsilon: float = setting(1e-8, "Adam's epsilon")
    max_grad_norm: float = setting(1.0, "clip gradients of each network to this global norm; 0 = never")
    eps_start: float = setting(0.5, "exploration at the start")
    eps_decay: float = setting(0.99998, "factor of exploration per step of the batch of environments")
    eps_min: float = setting(0.0, "exploration never falls below this")
    eps_spread: float = setting(
        0.0, "environments explore from eps to eps^(1 + eps_spread), each by its own exponent (arXiv 1803.00933)"
    )
    action_gradient: Literal["softmax", "gumbel", "expected"] = setting(
        "softmax",
        "softmax: critics see the softmax vector (published); gumbel: one-hot actions, relaxed for the actor "
        "(arXiv 1611.01144); expected: a value per action, the actor climbs their mean (arXiv 1709.00503)",
    )
    temperature: float = setting(1.0, "of relaxed Gumbel actions")
    critics: int = setting(1, "critics; targets take the smallest value (arXiv 1802.09477), the actor the mean")
    scale_observation: bool = setting(False, "divide observations by the largest absolute value that they may have")
    network: Literal["mlp", "bicnet"] = setting("mlp", "bicnet: an LSTM over the agents mixes them (arXiv 1703.10069)")
    units: int = setting(256, "units of each hidden layer")
    depth: int = setting(2, "hidden layers")
    first_layer: Literal["linear", "relu"] = setting("linear", "linear: no non-linearity behind the first (published)")
    layer_norm: bool = setting(False, "layer norm before each ReLU (arXiv 1607.06450)")
    initialiser: Literal["torch", "he"] = setting("torch", "torch: PyTorch's default; he: He normal, small last layer")
    entropy_weight: float = setting(0.0, "entropy bonus of the actor (arXiv 1602.01783)")
    logit_weight: float = setting(0.0, "cost of the actor's squared logits, which keeps the softmax from saturating")
    masking: bool = setting(False, "only actions that the environment's mask leaves open (arXiv 2006.14171)")

    def __post_init__(self) -> None:
        spec = self.spec
        if not isinstance(spec.action, Discrete):
            raise ValueError(f"ddpg here needs discrete actions, '{spec.name}' has continuous ones: use another algo")
        if not isinstance(spec.observation, Box):
            raise ValueError(f"ddpg takes one array per agent as observation, '{spec.name}' has several: join them")
        if self.masking and spec.next_mask is not independent_mask:
            raise ValueError(
                f"masking needs masks that do not depend on other agents' choices, unlike '{spec.name}'s: give "
                "--masking false"
            )
        if self.scale_observation and not 0 < self._largest < math.inf:
            raise ValueError(
                f"scale_observation needs observations with bounds, '{spec.name}' states none: leave it out"
            )
        for name in ("update_interval", "batch_size", "buffer_size", "n_step", "units", "depth", "critics"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("actor_lr", "critic_lr", "adam_epsilon", "updates_per_step", "temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in (
            "max_grad_norm",
            "eps_spread",
            "entropy_weight",
            "logit_weight",
            "warmup",
            "buffer_gb",
            "priority_alpha",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or above, not {getattr(self, name)}")
        for name in ("gamma", "tau", "eps_start", "eps_decay", "eps_min", "priority_beta"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, not {getattr(self, name)}")
        if self.updates < 1:
            raise ValueError(
                f"update_interval {self.update_interval} x updates_per_step {self.updates_per_step} is less than one "
                "update: raise one of them"
            )
        if self.batch_size % self.layout.shards:
            raise ValueError(f"{self.layout.shards} logical shards do not divide batch_size {self.batch_size}")
        if self.rows < self.update_interval + self.n_step:
            raise ValueError(
                f"the replay holds {self.rows - self.n_step} steps of each environment, fewer than update_interval "
                f"{self.update_interval}: raise buffer_size or buffer_gb, or lower num_envs"
            )
        if self.rows * self.layout.num_envs // self.layout.shards >= replay.MOST_ROWS:
            most = (replay.MOST_ROWS - 1) * self.layout.shards
            raise ValueError(
                f"the replay would hold {self.rows * self.layout.num_envs:,} steps, and {most:,} are the most: lower "
                f"{self.store_setting}"
            )
        if self._fill_steps > (self.rows - self.n_step) * self.layout.num_envs:
            name, held = "warmup" if self.warmup else "batch_size", (self.rows - self.n_step) * self.layout.num_envs
            raise ValueError(
                f"{name} {self._fill_steps:,} exceeds the {held:,} steps that the replay holds: lower it, or raise "
                f"{self.store_setting}"
            )

    @classmethod
    def batch(cls, spec: EnvSpec, settings: dict[str, Any], num_envs: int) -> int:
        return int(settings.get("batch_size", cls.batch_size))

    @property
    def updates(self) -> int:
        """Of one call of `learn`."""
        return round(self.update_interval * self.updates_per_step)

    @property
    def _fill_steps(self) -> int:
        return self.warmup or self.batch_size

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Collect until the first update may draw its batch, then collect and learn."""
        per_call = self.update_interval * self.layout.num_envs
        calls = max(-(-self._fill_steps // per_call), -(-self.n_step // self.update_interval))
        train = Phase("train", self.update_interval, self.updates)
        return (Phase("fill", self.update_interval, 0, iterations=calls - 1), train) if calls > 1 else (train,)

    # Sizes

    @property
    def _actions(self) -> int:
        assert isinstance(self.spec.action, Discrete)
        return self.spec.action.n

    @property
    def _observation(self) -> Box:
        assert isinstance(self.spec.observation, Box)
        return self.spec.observation

    @property
    def _seen(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What a row of the replay holds of a time step."""
        agents, box = self.spec.num_agents, self._observation
        dtype = replay.storage_dtype(box, self.replay_dtype)
        seen = {"observation": jax.ShapeDtypeStruct((agents, *box.shape), dtype)}
        return seen | ({"mask": jax.ShapeDtypeStruct((agents, self._actions), jnp.bool_)} if self.masking else {})

    @property
    def _answer(self) -> jax.ShapeDtypeStruct:
        """What a row holds of acting: the vector that critics see, or the action."""
        if self.action_gradient == "softmax":
            return jax.ShapeDtypeStruct((self.spec.num_agents, self._actions), jnp.float32)
        return jax.ShapeDtypeStruct((self.spec.num_agents,), jnp.uint8 if self._actions <= 256 else jnp.int32)

    @property
    def _row_bytes(self) -> int:
        return replay.row_bytes(self._seen, self._answer, self.spec.num_agents, self.prioritised)

    @property
    def rows(self) -> int:
        """Rows of the replay of each environment."""
        if self.buffer_gb:
            return int(self.buffer_gb * 1e9) // (self._row_bytes * self.layout.num_envs)
        return replay.rows_for(self.buffer_size, self.layout.num_envs, self.n_step)

    @property
    def store_setting(self) -> str:
        return "buffer_gb" if self.buffer_gb else "buffer_size"

    def largest_chunk(self) -> int:
        return self.batch_size // self.layout.shards

    def sample_bytes(self) -> int:
        """Activations of all agents of a stored step and their gradients, in actor and critics."""
        inputs = math.prod(self._observation.shape) + self._actions
        units = inputs + (self.depth + 8 * (self.network == "bicnet")) * self.units
        return 4 * 2 * self.spec.num_agents * units * (1 + self.critics)

    def data_bytes(self) -> int:
        """The batch that an update has drawn."""
        observation = math.prod(self._observation.shape) * 4
        row = self.spec.num_agents * (2 * observation + 8 * self.n_step + 32 * self._actions)
        return self.batch_size // self.layout.devices * row

    def summary(self) -> list[str]:
        envs, rows = self.layout.num_envs, self.rows
        ratio = self.updates * self.batch_size / (self.update_interval * envs)
        return [
            f"The replay holds {(rows - self.n_step) * envs:,} environment steps in "
            f"{rows * envs * self._row_bytes / 1e6:,.3g} MB; every {self.update_interval} steps of {envs} environments "
            f"bring {self.updates} updates of {self.batch_size} stored steps: each step is replayed {ratio:.3g} times."
        ]

    # Networks

    def _network(self, outputs: int) -> Any:
        return nets.TeamNet(
            outputs,
            self.units,
            self.depth,
            communication=self.network == "bicnet",
            rectify_first=self.first_layer == "relu",
            layer_norm=self.layer_norm,
            initialiser=self.initialiser,
            dtype=self.layout.compute_dtype,
        )

    @property
    def actor_net(self) -> Any:
        """Observations [N, A, ...] -> logits float32[N, A, n]."""
        return self._network(self._actions)

    @property
    def critic_net(self) -> Any:
        """Inputs of critics [N, A, ...] -> float32[N, A, 1], or [N, A, n] with a value per action."""
        return self._network(self._actions if self.action_gradient == "expected" else 1)

    def _flat(self, observation: Array) -> Array:
        """[N, A, ...] -> float32[N, A, D]."""
        flat = observation.reshape(*observation.shape[:2], -1).astype(jnp.float32)
        return flat / self._largest if self.scale_observation else flat

    @property
    def _largest(self) -> float:
        return float(max(abs(self._observation.low), abs(self._observation.high)))

    def logits(self, actor: Any, observation: Array) -> Array:
        """float32[N, A, n] of observations [N, A, ...]."""
        return self.actor_net.apply(actor, self._flat(observation))

    def values(self, critic: Any, observation: Array, vector: Array | None = None) -> Array:
        """Q(o, x) float32[C, N, A] of action vectors [N, A, n]; without vectors Q(o, .) float32[C, N, A, n]."""
        inputs = self._flat(observation)
        if vector is not None:
            inputs = jnp.concatenate([inputs, vector], axis=-1)
        out = jax.vmap(lambda params: self.critic_net.apply(params, inputs))(critic)
        return out[..., 0] if vector is not None else out

    @property
    def _optimiser(self) -> optax.GradientTransformation:
        return optimise.adam(self.adam_epsilon, self.max_grad_norm)

    # Protocol

    def init(self, key: Array, inputs: Any) -> AlgoState:
        """Fresh networks, or those of `inputs` ({"actor", "critic"}), fresh optimisers, an empty replay."""
        actor, critic = self._networks(key) if inputs is None else (inputs["actor"], inputs["critic"])
        params = DdpgParameters(
            actor=actor,
            critic=critic,
            target_actor=jax.tree.map(jnp.copy, actor),
            target_critic=jax.tree.map(jnp.copy, critic),
            actor_optimiser=self._optimiser.init(optimise.flat(actor)),
            critic_optimiser=self._optimiser.init(optimise.flat(critic)),
        )
        shards, envs = self.layout.local_shards, self.layout.num_envs // self.layout.shards
        sizes = (self.spec.num_agents, shards, self.rows, envs)
        return AlgoState(params, replay.create(self._seen, self._answer, *sizes, self.prioritised))

    def _networks(self, key: Array) -> tuple[Any, Any]:
        """Fresh actor and critics."""
        key_actor, key_critic = jax.random.split(key)
        observation = jnp.zeros((1, self.spec.num_agents, math.prod(self._observation.shape)))
        vector = jnp.zeros((1, self.spec.num_agents, self._actions))
        wide = observation if self.action_gradient == "expected" else jnp.concatenate([observation, vector], axis=-1)
        critic = jax.vmap(lambda k: self.critic_net.init(k, wide))(jax.random.split(key_critic, self.critics))
        return self.actor_net.init(key_actor, observation), critic

    def weights(self, state: AlgoState) -> Any:
        """What `init(inputs=...)` takes."""
        return {"actor": state.replicated.actor, "critic": state.replicated.critic}

    def policy(self, state: AlgoState) -> Any:
        """The actor's parameters."""
        return state.replicated.actor

    def epsilon(self, progress: Progress) -> Array:
        """Exploration after the steps made so far: eps_start x eps_decay^steps, at least eps_min."""
        steps = total(progress.vector_steps)
        decay = jnp.exp(math.log(self.eps_decay) * steps) if self.eps_decay else (steps == 0).astype(jnp.float32)
        return jnp.maximum(self.eps_start * decay, self.eps_min)

    def init_actor(self, policy: Any, timestep: TimeStep, indices: Array) -> Any:
        """float32[B], the exponent of exploration of each environment, or () where all explore alike."""
        if not self.eps_spread:
            return ()
        return 1 + self.eps_spread * indices.astype(jnp.float32) / max(self.layout.num_envs - 1, 1)

    def act(
        self, policy: Any, actor: Any, timestep: TimeStep, keys: Array, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """Actions drawn from the softmax, in training with exploration; with mode "best" the most probable ones.

        With "softmax" an environment explores with all its agents at once, by a vector of uniform numbers that is
        stored as it is. Otherwise every agent mixes in uniform actions by itself.
        """
        mask = self._mask(timestep)
        vector = masked_softmax(self.logits(policy, timestep.observation), mask)
        if mode == "best":
            return jnp.argmax(vector, axis=-1).astype(jnp.int32), actor, ()
        published = self.action_gradient == "softmax"
        epsilon = jnp.zeros(len(keys))
        if mode == "explore":
            epsilon = self.epsilon(progress) ** (actor if self.eps_spread else jnp.ones(len(keys)))
        open_ = jnp.ones(vector.shape, bool) if mask is None else mask

        def one(vector: Array, open_: Array, key: Array, epsilon: Array) -> tuple[Array, Array]:
            key_coin, key_vector, key_action = jax.random.split(key, 3)
            if published:
                random = jnp.where(open_, jax.random.uniform(key_vector, vector.shape), 0.0)
                vector = jnp.where(jax.random.uniform(key_coin) > epsilon, vector, random)
                chances = vector
            else:
                chances = (1 - epsilon) * vector + epsilon * distributions.renormalise(jnp.ones_like(vector), open_)
            action = jax.vmap(distributions.sample)(jax.random.split(key_action, len(vector)), chances)
            return action, vector

        action, vector = jax.vmap(one)(vector, open_, keys, epsilon)
        return action, actor, {"vector": vector} if published else ()

    def _mask(self, timestep: TimeStep) -> Array | None:
        if not self.masking:
            return None
        if timestep.action_mask is None:
            raise ValueError(f"'{self.spec.name}' gives no action masks with these settings: give --masking false")
        return timestep.action_mask

    def learn(
        self,
        state: AlgoState,
        trajectory: Trajectory | None,
        last_timestep: TimeStep | None,
        key: Array,
        progress: Progress,
        phase: Phase,
    ) -> tuple[AlgoState, dict[str, Array]]:
        """Store what was collected, then make the updates of the phase."""
        assert trajectory is not None and last_timestep is not None
        ring = self._store(state.split, trajectory, last_timestep)
        if phase.updates == 0:
            return AlgoState(state.replicated, ring), {}
        layout = self.layout
        beta = layout.alone(lambda p: self.priority_beta + (1 - self.priority_beta) * p.fraction)(progress)

        keys = jax.vmap(lambda number: jax.random.split(jax.random.fold_in(key, number)))(jnp.arange(phase.updates))
        # where priorities do not change with every update, all batches are chosen at once: fewer, larger operations
        chosen = () if self.prioritised else jax.vmap(lambda pair: self._choose(ring, pair[0], beta))(keys)

        def update(carry: tuple[DdpgParameters, Any], row: tuple[Array, Any]) -> Any:
            (params, marks), ((key_choice, key_noise), chosen) = carry, row
            index, weight = chosen or self._choose(dataclasses.replace(ring, marks=marks), key_choice, beta)
            batch = self._gather(ring, index) | {"weight": weight}
            if self.action_gradient == "gumbel":
                noise = lambda k: jax.random.gumbel(  # noqa: E731
                    k, (index.shape[1], 2, self.spec.num_agents, self._actions)
                )
                batch["noise"] = jax.vmap(noise)(layout.shard_keys(key_noise))
            params, metrics, error = self.update(params, batch)
            if self.prioritised:

                def mark(marks: Marks, index: Array, error: Array, weight: Array) -> Marks:
                    return replay.set_priorities(marks, index, error, weight, self.priority_alpha)

                rows = (marks, index, error, batch["weight"])
                marks = layout.over_envs(lambda rows: jax.vmap(mark)(*rows), rows, axis=0)
            return (params, marks), jnp.stack([metrics[name] for name in METRICS])  # one write, not one for each

        (params, marks), rows = jax.lax.scan(update, (self.pack(state.replicated), ring.marks), (keys, chosen))
        metrics = {name: rows[:, k] for k, name in enumerate(METRICS)}
        metrics["epsilon"] = layout.alone(self.epsilon)(progress)
        return AlgoState(self.unpack(params), dataclasses.replace(ring, marks=marks)), metrics

    # Pieces

    @functools.cached_property
    def _shapes(self) -> dict[str, Any]:
        """ShapeDtypeStructs of the networks."""
        actor, critic = jax.eval_shape(self._networks, jax.random.key(0))
        return {"actor": actor, "critic": critic, "target_actor": actor, "target_critic": critic}

    def pack(self, params: DdpgParameters) -> DdpgParameters:
        """Every network as one vector, [P], so that a step of all its leaves is a few operations."""
        return dataclasses.replace(params, **{name: optimise.flat(getattr(params, name)) for name in self._shapes})

    def unpack(self, params: DdpgParameters) -> DdpgParameters:
        """What `pack` packed."""
        trees = {name: optimise.unflat(getattr(params, name), like) for name, like in self._shapes.items()}
        return dataclasses.replace(params, **trees)

    def _store(self, ring: Replay, trajectory: Trajectory, last: TimeStep) -> Replay:
        """Rows [T + 1, B, ...]: the trajectory's, and the one behind them, whose action is not known yet."""
        step = trajectory.timestep
        join = lambda rows, last: jnp.concatenate([rows, last[None].astype(rows.dtype)])  # noqa: E731
        seen = {"observation": join(step.observation.astype(self._seen["observation"].dtype), last.observation)}
        if self.masking:
            seen["mask"] = join(self._mask(step), self._mask(last))
        answer = trajectory.extras["vector"] if self.action_gradient == "softmax" else trajectory.action
        end = replay.ends(join(step.terminated, last.terminated), join(step.truncated, last.truncated))
        return replay.write(ring, seen, answer, join(step.reward, last.reward), end)

    def _choose(self, ring: Replay, key: Array, beta: Array) -> tuple[Array, Array]:
        """Where a batch of this device's shards is drawn, int32[S, m], and the samples' weights, float32[S, m]."""
        number, n = self.batch_size // self.layout.shards, self.n_step
        keys = self.layout.shard_keys(key)
        if self.prioritised:

            def choose(key: Array, marks: Marks, head: Array, filled: Array) -> tuple[Array, Array]:
                return replay.choose_by_priority(key, marks.priority, head, filled, number, n, beta)

            rows = (keys, ring.marks, ring.head, ring.filled)
            return self.layout.over_envs(lambda rows: jax.vmap(choose)(*rows), rows, axis=0)
        uniform = lambda key, end, head, filled: replay.choose(key, end, head, filled, number, n)  # noqa: E731
        return jax.vmap(uniform)(keys, ring.end, ring.head, ring.filled)

    def _gather(self, ring: Replay, index: Array) -> dict[str, Array]:
        """The batch that starts at int32[S, m], leaves [S, m, ...], but for its weights."""
        sample = jax.vmap(lambda shard, index: replay.gather(shard, index, self.n_step))(ring, index)
        batch = {"answer": sample.answer, "reward": sample.reward, "end": sample.end, **sample.seen}
        return batch | {f"next_{name}": value for name, value in sample.next_seen.items()}

    def update(
        self, params: DdpgParameters, batch: dict[str, Array]
    ) -> tuple[DdpgParameters, dict[str, Array], Array | None]:
        """Critic, then actor, each with its target, on a batch with leaves [S, m, ...] (`_gather`, and "weight").

        Returns:
            parameters, packed as those given; metrics float32[]; error float32[S, m] of the critic before its step,
            for priorities, or None.
        """
        layout, shapes, trees = self.layout, self._shapes, self.unpack(params)
        batch = batch | {"target": layout.apply(lambda sample: self._target(trees, sample), batch)}
        error = layout.apply(lambda sample: self._error(trees, sample), batch) if self.prioritised else None

        def of_critic(critic: Array, sample: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
            values = self._taken_values(optimise.unflat(critic, shapes["critic"]), sample)
            return critic_loss(values, sample["target"], sample["weight"]), {"q_mean": values.mean()}

        gradient, (critic_value, critic_means) = layout.gradient(of_critic, params.critic, batch)
        step = layout.alone(self._step)
        critic, target_critic, critic_optimiser, critic_norm = step(
            gradient, params.critic, params.target_critic, params.critic_optimiser, jnp.float32(self.critic_lr)
        )
        improved = optimise.unflat(critic, shapes["critic"])

        def of_actor(actor: Array, sample: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
            return self._actor_loss(optimise.unflat(actor, shapes["actor"]), improved, sample)

        gradient, (actor_value, actor_means) = layout.gradient(of_actor, params.actor, batch)
        actor, target_actor, actor_optimiser, actor_norm = step(
            gradient, params.actor, params.target_actor, params.actor_optimiser, jnp.float32(self.actor_lr)
        )
        metrics = {
            "critic_loss": critic_value,
            "critic_grad_norm": critic_norm,
            "actor_loss": actor_value,
            "actor_grad_norm": actor_norm,
            "target_mean": layout.average(batch["target"].reshape(*batch["weight"].shape[:1], -1)),
        }
        new = DdpgParameters(actor, critic, target_actor, target_critic, actor_optimiser, critic_optimiser)
        return new, metrics | critic_means | actor_means, error

    def _step(
        self, gradient: Array, params: Array, target: Array, state: Any, rate: Array
    ) -> tuple[Array, Array, Any, Array]:
        """One clipped Adam step [P] and the target's: parameters, target, optimiser, norm before clipping."""
        params, state = optimise.descend(self._optimiser, gradient, params, state, rate)
        return params, (1 - self.tau) * target + self.tau * params, state, optimise.norm(gradient)

    def _target(self, params: DdpgParameters, sample: dict[str, Array]) -> Array:
        """R + gamma^k V' of target networks, float32[N, A]; V' is that of the target policy's action."""
        observation, mask = sample["next_observation"], sample.get("next_mask")
        logits = self.logits(params.target_actor, observation)
        policy = masked_softmax(logits, mask)
        if self.action_gradient == "expected":
            value = expected_value(policy, self.values(params.target_critic, observation).min(0))
        else:
            if self.action_gradient == "gumbel":
                open_logits = logits if mask is None else jnp.where(mask, logits, -1e9)
                drawn = jnp.argmax(open_logits + sample["noise"][:, 0], axis=-1)
                policy = jax.nn.one_hot(drawn, self._actions, dtype=jnp.float32)
            value = self.values(params.target_critic, observation, policy).min(0)
        window = jax.vmap(lambda reward, end: replay.n_step_return(reward, end, self.gamma))
        returns, discount = window(sample["reward"], sample["end"])
        return returns + discount[:, None] * value

    def _taken_values(self, critic: Any, sample: dict[str, Array]) -> Array:
        """Critics' values of what was stored, float32[C, N, A]."""
        answer = sample["answer"]
        if self.action_gradient == "expected":
            values = self.values(critic, sample["observation"])
            chosen = jnp.broadcast_to(answer.astype(jnp.int32)[None], values.shape[:-1])
            return distributions.choose(values, chosen)
        if self.action_gradient == "gumbel":
            answer = jax.nn.one_hot(answer, self._actions, dtype=jnp.float32)
        return self.values(critic, sample["observation"], answer)

    def _error(self, params: DdpgParameters, sample: dict[str, Array]) -> Array:
        """Mean size of the critics' errors of each sample, float32[N]."""
        values = self._taken_values(params.critic, sample)
        return jnp.abs(sample["target"][None] - values).mean((0, 2))

    def _actor_loss(self, actor: Any, critic: Any, sample: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        """- mean over samples, agents and critics of the value of what the actor would do, and regularisers."""
        observation, mask = sample["observation"], sample.get("mask")
        logits = self.logits(actor, observation)
        policy = masked_softmax(logits, mask)
        if self.action_gradient == "expected":
            value = expected_value(policy, self.values(critic, observation).mean(0))
        else:
            vector = policy
            if self.action_gradient == "gumbel":
                open_logits = logits if mask is None else jnp.where(mask, logits, -1e9)
                vector = relaxed_one_hot(open_logits, sample["noise"][:, 1], self.temperature)
            value = self.values(critic, observation, vector).mean(0)
        used = (sample["weight"] > 0).astype(jnp.float32)[:, None]
        entropy = jnp.mean(used * distributions.entropy(policy))
        loss = -jnp.mean(used * value)
        if self.entropy_weight:
            loss = loss - self.entropy_weight * entropy
        if self.logit_weight:
            loss = loss + self.logit_weight * jnp.mean(used[..., None] * jnp.square(logits))
        return loss, {"policy_entropy": entropy}


@dataclasses.dataclass(frozen=True)
class Bicnet(Ddpg):
    """The same with networks that mix the agents (Peng et al. 2017, arXiv 1703.10069)."""

    network: Literal["mlp", "bicnet"] = setting("bicnet", "bicnet: an LSTM over the agents mixes them")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.network != "bicnet":
            raise ValueError(f"bicnet with the network '{self.network}' is ddpg: use --algo ddpg")
