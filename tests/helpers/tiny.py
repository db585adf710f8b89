"""Tiny environments, with early ends (Corridor) and continuous actions (PointMass), and a tiny algorithm (TinyQ)."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from envs_jax import Box, Discrete, Environment, EnvSpec, TimeStep
from envs_jax.base import Array, pytree, setting
from envs_jax.progress import Progress, total
from jaxrl.algos.base import Algorithm, AlgoState, Mode, Phase, Trajectory
from jaxrl.nn import optimizers


@pytree
class CorridorState:
    """position int32[A], t int32[], key key[]."""

    position: Array
    t: Array
    key: Array


@dataclasses.dataclass(frozen=True)
class Corridor(Environment):
    """Agents walk a corridor; all must reach its right end. Ends early with reward 1, or cut at the horizon."""

    num_agents: int = setting(1, "agents in the corridor")
    length: int = setting(4, "steps from end to end")
    horizon: int = setting(10, "steps after which an episode is cut")

    @property
    def spec(self) -> EnvSpec:
        size = self.length + 1
        return EnvSpec(
            name="corridor",
            num_agents=self.num_agents,
            observation=Box((size,), jnp.float32, 0.0, 1.0),
            action=Discrete(2),
            horizon=self.horizon,
            metrics={"reached": "max"},
            shares=("reached",),
            critic_input_spec=Box((size + self.num_agents * size + self.num_agents,), jnp.float32, 0.0, 1.0),
            critic_input=self._critic_input,
        )

    def _critic_input(self, timestep: TimeStep, action: Array) -> Array:
        others = (1 - jnp.eye(self.num_agents)) * (action + 1).astype(jnp.float32)[None] / 2
        team = jnp.broadcast_to(timestep.observation.reshape(1, -1), (self.num_agents, timestep.observation.size))
        return jnp.concatenate(
            [timestep.observation, team.astype(timestep.observation.dtype), others.astype(timestep.observation.dtype)],
            axis=1,
        )

    def _timestep(self, state: CorridorState, reward: Any, first: bool) -> TimeStep:
        reached = jnp.all(state.position == self.length)
        return TimeStep(
            observation=jax.nn.one_hot(state.position, self.length + 1),
            action_mask=jnp.ones((self.num_agents, 2), bool),
            reward=jnp.full(self.num_agents, reward, jnp.float32),
            terminated=reached,
            truncated=~reached & (state.t >= self.horizon),
            first=jnp.asarray(first),
            metrics={"reached": reached.astype(jnp.float32)},
        )

    def reset(self, key: Array, context: Any = None) -> tuple[CorridorState, TimeStep]:
        position = jax.random.randint(key, (self.num_agents,), 0, self.length)
        state = CorridorState(position, jnp.int32(0), key)
        return state, self._timestep(state, 0.0, True)

    def step(self, state: CorridorState, action: Array, context: Any = None) -> tuple[CorridorState, TimeStep]:
        position = jnp.clip(state.position + 2 * action - 1, 0, self.length)
        state = CorridorState(position, state.t + 1, state.key)
        return state, self._timestep(state, jnp.all(position == self.length).astype(jnp.float32), False)

    baselines: ClassVar = {"right": lambda env, state, timestep, key: jnp.ones(env.num_agents, jnp.int32)}


@dataclasses.dataclass(frozen=True)
class Treadmill(Corridor):
    """Never ends by itself; every step is worth 1."""

    def _timestep(self, state: CorridorState, reward: Any, first: bool) -> TimeStep:
        timestep = super()._timestep(state, 0.0 if first else 1.0, first)
        return dataclasses.replace(timestep, terminated=jnp.bool_(False), truncated=state.t >= self.horizon)


@dataclasses.dataclass(frozen=True)
class TinyQ(Algorithm):
    """Q-learning with a linear network and a replay of whole rows, one ring per logical shard."""

    update_interval: int = setting(4, "steps between calls of learn")
    updates_per_step: float = setting(1.0, "gradient updates per step")
    capacity: int = setting(64, "rows of the replay")
    batch_size: int = setting(32, "samples per update")
    gamma: float = setting(0.9, "discount", between=(0, 1))
    lr: float = setting(0.1, "learning rate")

    sweepable: ClassVar[tuple[str, ...]] = ("gamma", "lr")
    respects_masks: ClassVar[bool] = False

    @classmethod
    def batch(cls, spec: EnvSpec, settings: dict[str, Any], num_envs: int) -> int:
        return settings.get("batch_size", cls.batch_size)

    @property
    def phases(self) -> tuple[Phase, ...]:
        updates = round(self.update_interval * self.updates_per_step)
        return (Phase("fill", self.update_interval, 0, iterations=2), Phase("train", self.update_interval, updates))

    def init(self, key: Array, inputs: Any) -> AlgoState:
        weights = jnp.zeros((self.spec.observation.shape[0], self.spec.action.n))
        envs = self.layout.num_envs // self.layout.shards
        rows = (self.layout.local_shards, self.capacity, envs, self.spec.num_agents)
        replay = {
            "observation": jnp.zeros((*rows, self.spec.observation.shape[0]), jnp.float16),
            "action": jnp.zeros(rows, jnp.int32),
            "reward": jnp.zeros(rows),
            "terminated": jnp.zeros(rows, bool),
            "done": jnp.ones(rows, bool),
            "head": jnp.zeros(self.layout.local_shards, jnp.int32),
        }
        return AlgoState({"weights": weights, "optimizer": optimizers.adam().init(weights)}, replay)

    def policy(self, state: AlgoState) -> Any:
        return state.replicated["weights"]

    def act(
        self, policy: Any, carry: Any, timestep: TimeStep, keys: Array, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        greedy = jnp.argmax(timestep.observation @ policy, axis=-1).astype(jnp.int32)
        if mode != "explore":
            return greedy, carry, ()
        epsilon = jnp.maximum(1 - total(progress.vector_steps) / 200, 0.2)
        shape = greedy.shape[1:]
        random = jax.vmap(lambda k: jax.random.randint(k, shape, 0, 2))(keys)
        coin = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, 1), shape))(keys)
        return jnp.where(coin < epsilon, random, greedy), carry, ()

    def learn(
        self,
        state: AlgoState,
        trajectory: Trajectory | None,
        last_timestep: TimeStep | None,
        key: Array,
        progress: Progress,
        phase: Phase,
    ) -> tuple[AlgoState, dict[str, Array]]:
        step = trajectory.timestep
        new = {
            "observation": step.observation,
            "action": trajectory.action,
            "reward": step.reward,
            "terminated": jnp.broadcast_to(step.terminated[..., None], trajectory.action.shape),
            "done": jnp.broadcast_to(step.done[..., None], trajectory.action.shape),
        }
        shards, rows = self.layout.local_shards, trajectory.action.shape[0]
        head = state.sharded["head"]
        slots = (head[0] + jnp.arange(rows)) % self.capacity

        def write(buffer: Array, rows: Array) -> Array:  # rows [T, B local, ...] -> ring [S, capacity, B / S, ...]
            rows = jnp.swapaxes(rows, 0, 1)
            rows = jnp.swapaxes(rows.reshape(shards, -1, *rows.shape[1:]), 1, 2)
            return buffer.at[:, slots].set(rows.astype(buffer.dtype))

        replay = {name: write(state.sharded[name], rows) for name, rows in new.items()} | {"head": head + rows}
        if phase.updates == 0:
            return AlgoState(state.replicated, replay), {}
        newest = (replay["head"][0] - 1) % self.capacity
        size = jnp.minimum(replay["head"][0], self.capacity)

        def sample(buffer: dict[str, Array], key: Array) -> dict[str, Array]:
            per_shard = self.batch_size // self.layout.shards
            key_age, key_env = jax.random.split(key)
            age = jax.random.randint(key_age, (per_shard,), 1, size)  # the newest row has no successor yet
            row, env = (
                (newest - age) % self.capacity,
                jax.random.randint(key_env, (per_shard,), 0, buffer["action"].shape[1]),
            )
            after = (row + 1) % self.capacity
            return {
                "observation": buffer["observation"][row, env],
                "action": buffer["action"][row, env],
                "valid": ~buffer["done"][row, env],
                "reward": buffer["reward"][after, env],
                "terminated": buffer["terminated"][after, env],
                "next": buffer["observation"][after, env],
            }

        def loss(weights: Array, batch: dict[str, Array]) -> tuple[Array, Any]:
            q = jnp.take_along_axis(batch["observation"].astype(jnp.float32) @ weights, batch["action"][..., None], -1)
            best = jnp.max(batch["next"].astype(jnp.float32) @ weights, -1)
            target = batch["reward"] + self.gamma * (1 - batch["terminated"].astype(jnp.float32)) * best
            error = q[..., 0] - jax.lax.stop_gradient(target)
            return jnp.mean(batch["valid"].astype(jnp.float32) * error**2), ()

        def update(params: dict[str, Any], index: Array) -> tuple[dict[str, Any], Array]:
            keys = self.layout.shard_keys(jax.random.fold_in(key, index))
            batch = jax.vmap(sample)(replay, keys)
            gradient, (value, _) = self.layout.gradient(loss, params["weights"], batch)
            change, optimizer = optimizers.adam().update(gradient, params["optimizer"])
            return {"weights": params["weights"] + self.lr * change, "optimizer": optimizer}, value

        params, losses = jax.lax.scan(update, state.replicated, jnp.arange(phase.updates))
        return AlgoState(params, replay), {"loss": losses}


@pytree
class PointState:
    """place float32[A, D], task int32[], t int32[], key key[]."""

    place: Array
    task: Array
    t: Array
    key: Array


@dataclasses.dataclass(frozen=True)
class PointMass(Environment):
    """Agents push themselves to a corner, another one in every task; continuous actions, cut at the horizon only."""

    num_agents: int = setting(1, "points")
    dimensions: int = setting(2, "of the room, which is [-1, 1] each way")
    tasks: int = setting(1, "corners, shown to the agents as the last number")
    horizon: int = setting(8, "steps of an episode")
    reach: float = setting(0.5, "largest step")
    box: float = setting(1.0, "actions lie in [- box, box]")

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(
            name="point_mass",
            num_agents=self.num_agents,
            observation=Box((self.dimensions + 1,), jnp.float32, -1.0, max(1.0, self.tasks - 1.0)),
            action=Box((self.dimensions,), jnp.float32, -self.box, self.box),
            horizon=self.horizon,
            fixed_horizon=True,
            metrics={"distance": "last"},
            score="distance",
            score_mode="min",
            num_tasks=self.tasks,
        )

    def _timestep(self, state: PointState, first: bool) -> TimeStep:
        corner = jnp.where(state.task % 2 == 0, 0.5, -0.5)
        distance = jnp.abs(state.place - corner).mean(-1)
        task = jnp.full((self.num_agents, 1), state.task, jnp.float32)
        return TimeStep(
            observation=jnp.concatenate([state.place, task], axis=-1),
            reward=jnp.where(first, 0.0, 1.0 - distance),
            terminated=jnp.bool_(False),
            truncated=state.t >= self.horizon,
            first=jnp.asarray(first),
            metrics={"distance": distance.mean()},
            task=state.task if self.tasks > 1 else (),
        )

    def reset(self, key: Array, context: Any = None) -> tuple[PointState, TimeStep]:
        key_place, key_task = jax.random.split(key)
        place = jax.random.uniform(key_place, (self.num_agents, self.dimensions), minval=-1.0, maxval=1.0)
        state = PointState(place, jax.random.randint(key_task, (), 0, self.tasks), jnp.int32(0), key)
        return state, self._timestep(state, True)

    def step(self, state: PointState, action: Array, context: Any = None) -> tuple[PointState, TimeStep]:
        push = self.reach / self.box * jnp.clip(action, -self.box, self.box)
        state = dataclasses.replace(state, place=jnp.clip(state.place + push, -1.0, 1.0), t=state.t + 1)
        return state, self._timestep(state, False)
