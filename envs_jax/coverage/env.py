"""The mission: order of moves, measurements, messages and rewards.

Measurement index k counts the measurements of an agent: k = 0 is taken at the start, k = t + 1 after the move of step
t. The state at time t holds the local beliefs with everything up to the messages of time t fused in, and the team's
belief with measurements 0 to t of all agents. A step moves all agents at once, then every agent measures and enters
its own readings, then the messages of time t + 1 are fused, then the team's map (`maps/__init__.py` has the rule). A
mission has budget + 1 steps and never ends earlier.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, Box, Discrete, Environment, EnvSpec, FirstStage, Reduction, TimeStep
from envs_jax.batch import BatchedEnvironment, BatchState
from envs_jax.coverage import (
    actions,
    baselines,
    communication,
    egocentric,
    joining,
    maps,
    observation,
    reward,
    sensor,
    starts,
    teams,
    terrain,
    world,
)
from envs_jax.coverage.joining import Numbers
from envs_jax.coverage.maps.types import Maps, Measurements, Sent, UpdateStats, empty
from envs_jax.coverage.sensor import Noise
from envs_jax.coverage.terrain import Terrain
from envs_jax.coverage.types import SMALL_Q, CoverageConfig, State
from envs_jax.progress import Progress, start
from envs_jax.stages import on_cpu, runs_triton, when


@dataclasses.dataclass(frozen=True)
class Coverage(CoverageConfig):
    """Multi-UAV terrain mapping; see the package for the source of the rules, `CoverageConfig` for the settings."""

    version = 1
    baselines = baselines.BASELINES

    @functools.cached_property
    def spec(self) -> EnvSpec:
        side = world.LATTICE
        agents = self.num_agents
        ages = agents if self.show_ages else 0
        more_labels = dict(communication.METRICS) if self.counts_messages else {}
        if self.has_teams:
            more_labels["uavs"] = "UAVs that fly"
        reductions: dict[str, Reduction] = dict.fromkeys(more_labels, "last")
        if self.mission_metrics:
            more_labels |= reward.MISSION_METRICS
            reductions |= {"rmse": "last", "path_length": "sum", "measurements": "sum"}
        next_mask = actions.next_team_mask if self.has_teams else actions.next_mask
        return EnvSpec(
            name="coverage",
            num_agents=agents,
            observation=Box((side, side, observation.ACTOR_CHANNELS + ages), low=0.0, high=1.0),
            action=Discrete(self.num_actions),
            horizon=self.steps,
            fixed_horizon=True,
            metrics={
                "entropy": "last",
                "f1": "last",
                "coverage": "last",
                "roi_coverage": "last",
                "return_abs": "sum",
                **reductions,
            },
            labels={
                "entropy": "entropy in region, bit",
                "f1": "F1 score",
                "coverage": "share of map seen",
                "roi_coverage": "share of region seen",
                "return_abs": "return (absolute gain)",
            }
            | more_labels,
            global_state={
                "maps": Box((side, side, observation.TEAM_CHANNELS), low=0.0, high=1.0),
                "positions": Box((agents, 3), jnp.int32, low=0, high=side - 1),
            },
            critic_input_spec=Box((side, side, observation.CRITIC_CHANNELS + ages), low=0.0, high=1.0),
            next_mask=functools.partial(next_mask, num_actions=self.num_actions),
            critic_input=functools.partial(observation.critic_input, num_actions=self.num_actions),
            egocentric=functools.partial(egocentric.egocentric, num_actions=self.num_actions, ages=ages),
            score="entropy",
            score_mode="min",
            absent_agents=self.has_teams,
            links=agents > 1,
            max_link_age=self.max_delay if agents > 1 else 0,
        )

    # The deterministic core: readings, messages and moves come from outside

    def begin(
        self, key: Array, ground: Terrain, positions: Array, comm_range: Array, channel: Any = (), team: Any = ()
    ) -> State:
        """The state before the first measurement, with positions int32[A, 3]; follow with `observe_and_fuse`."""
        return State(
            key=key,
            t=jnp.int32(-1),
            comm_range=comm_range,
            terrain=ground,
            positions=positions,
            maps=empty(self.map_config, ground),
            pending_reward=jnp.zeros((2,), jnp.float32),
            channel=channel,
            team=team,
        )

    @functools.partial(jax.jit, static_argnums=0)  # a reset and a step both end with it: it is traced once
    def observe_and_fuse(
        self, state: State, positions: Array, received: Array, source: Any, sent: Any = (), channel: Any = ()
    ) -> tuple[State, TimeStep]:
        """Let all agents present measure at `positions` and fuse what they receive; time goes on by one.

        Args:
            state: of the time before (t = -1: from `begin`).
            positions: int32[A, 3], lattice positions after the move.
            received: bool[A, A], [i, j] = agent i receives the message of agent j.
            source: `sensor.Noise`, or readings bool[A, n, n] (true = read as class 1; read inside footprints only).
            sent: `Sent`, what these messages hold; () = the measurements at `positions`.
            channel: the `Channel` afterwards, () where there is none.
        """
        measurements = self._measure(state, positions, received, source, sent)
        backend = maps.choose(self.map_backend, self.q, batched=False)
        updated, stats = backend.update(self.map_config, state.maps, measurements)
        return self._conclude(state, measurements, updated, stats, channel)

    # Environment

    def context(self, progress: Progress) -> Any:
        """float32[]: the share of failure rates and delays in the missions that begin now; () without a ramp.

        In place of it `reset` and `step` take the `Numbers` of `join`.
        """
        return jnp.minimum(progress.fraction / self.channel_ramp, 1.0) if self.channel_ramp else ()

    def first_stage(self) -> FirstStage | None:
        """Return missions on small maps: observations hardly depend on the resolution, so what is learned is of use."""
        if not self.small_maps_first or self.q <= SMALL_Q:
            return None
        small = dataclasses.replace(self, q=SMALL_Q, small_maps_first=0.0)
        return FirstStage("small maps", small, self.small_maps_first)

    def for_evaluation(self) -> "Coverage":
        """Return the environment with the full failure rates and delays."""
        return dataclasses.replace(self, channel_ramp=0.0) if self.channel_ramp else self

    def join(self, others: Sequence[Environment]) -> tuple[Environment, list[Any]] | None:
        envs = (self, *others)  # rules of a subclass may not read the context
        return joining.join(envs) if all(type(env) is Coverage for env in envs) else None

    def count_agents(self, context: Any) -> Any:
        return self._numbers(context).num_agents

    def reset(self, key: Array, context: Any = None) -> tuple[State, TimeStep]:
        state = self._draw_mission(key, context)
        return self.observe_and_fuse(state, state.positions, *self._draw(state, state.positions))

    def step(self, state: State, action: Array, context: Any = None) -> tuple[State, TimeStep]:
        state, positions = self._move(state, action, context)
        return self.observe_and_fuse(state, positions, *self._draw(state, positions))

    def batched(self) -> BatchedEnvironment:
        return CoverageBatch(self)

    def for_this_device(self) -> "Coverage":
        backend = self.map_backend
        if on_cpu():
            backend = "auto" if backend == "pallas" else backend  # which CPUs only interpret
        elif backend == "auto":
            backend = "pallas" if runs_triton() else "dense"
        return dataclasses.replace(self, map_backend=backend)

    def step_label(self, step: int) -> str:
        return f"{step + 1} measurement{'s' if step else ''}"

    def viewer(self) -> Any:
        from envs_jax.coverage.viewer import CoverageViewer

        return CoverageViewer()

    # Parts

    def _draw_mission(self, key: Array, context: Any = None) -> State:
        key_terrain, key_start, key_range = jax.random.split(key, 3)
        numbers = self._numbers(context)
        if (file_ground := self.ground) is not None:
            ground = terrain.from_raster(file_ground)
        elif self.terrain == "split" and self.start == "original":
            ground = terrain.split(*starts.original_split(starts.mission_number(key)), self.n)
        else:
            families = terrain.FAMILIES if self.terrain == "mixed" else (self.terrain,)
            ground = terrain.draw(key_terrain, families, self.n)
        positions = starts.draw(self.start, key, key_start, self.num_agents)
        comm_range = jnp.float32(numbers.comm_range)
        if self.random_range:
            comm_range = communication.draw_range(key_range)
            comm_range = comm_range if self.stretch == 1.0 else comm_range / self.stretch
        team: Any = ()
        if self.has_teams:
            team = teams.draw(key, numbers.team_sizes, self.num_agents)
        channel: Any = ()
        if (config := self.channel_config) is not None:
            share = self.context(start()) if context is None else context
            share = share if self.channel_ramp else None
            channel = communication.begin(config, numbers, key, positions, share, team)
        return self.begin(key, ground, positions, comm_range, channel, team)

    def _numbers(self, context: Any) -> Numbers:
        return context if isinstance(context, Numbers) else self.numbers

    def _move(self, state: State, action: Array, context: Any = None) -> tuple[State, Array]:
        """Return the state without the agents that fail now, and positions int32[A, 3] after the actions int32[A]."""
        positions = actions.move(state.positions, action, self.num_actions)
        if not self.has_teams:
            return state, positions
        team = teams.lose(state.key, state.t + 1, state.team, self._numbers(context).loss_rate)
        positions = jnp.where(team.present[:, None], positions, state.positions)
        return dataclasses.replace(state, team=team), positions

    def _draw(self, state: State, positions: Array) -> tuple[Array, Noise, Any, Any]:
        """Draw what the measurement that follows `state` needs, see `Measurements`.

        These are the messages received, the noise of the readings, what the messages hold, and the channel afterwards.
        """
        key = state.key
        index = state.t + 1
        config = self.channel_config
        noise = functools.partial(sensor.noise, key, num_agents=self.num_agents)
        if config is None:
            links = key, index, positions, state.comm_range, self.failure_rates[0]
            received = communication.draw_received(*links, *((state.team,) if self.has_teams else ()))
            return received, noise(index), (), ()
        received, sent_positions, sent_index, channel = communication.exchange(
            config, state.channel, key, index, positions, state.comm_range, state.team
        )
        sent = Sent(sent_positions, noise(sent_index)) if config.max_delay else ()
        return received, noise(index), sent, channel

    def _measure(self, state: State, positions: Array, received: Array, source: Any, sent: Any) -> Measurements:
        present = state.team.present if self.has_teams else ()
        return Measurements(state.terrain, positions, received, source, sent, present)

    def _conclude(
        self, state: State, measurements: Measurements, updated: Maps, stats: UpdateStats, channel: Any
    ) -> tuple[State, TimeStep]:
        t = state.t + 1
        scale = self.reward_scale
        offset = self.reward_offset
        before = stats.before
        after = updated.sums.weighted
        if self.reward == "region":
            sums = state.maps.sums.interest, updated.sums.interest
            training = reward.region(*sums, state.terrain.count, scale, offset)
        else:
            training = reward.relative(before, after, scale, offset)
        rewards = jnp.stack([training, reward.absolute(before, after, self.n, self.weights)])
        reward_now = rewards if self.reward_timing == "aligned" else state.pending_reward
        reward_now = jnp.where(t > 0, reward_now, jnp.zeros_like(reward_now))
        config = self.channel_config
        team = state.team
        more_metrics = dict[str, Array]()
        ages = communication.ages(config, channel, t) if config is not None and self.show_ages else None
        if config is not None and self.counts_messages:
            more_metrics = communication.metrics(config, channel, t)
        if self.has_teams:
            more_metrics["uavs"] = jnp.sum(team.present, dtype=jnp.int32).astype(jnp.float32)
        if self.mission_metrics:
            n = self.n
            flying = team.present if self.has_teams else np.ones(self.num_agents, bool)
            truth = terrain.whole(state.terrain, n)
            more_metrics |= {
                "rmse": reward.rmse(self.storage, updated.beliefs[-1, :n, :n], truth),
                "path_length": reward.path_length(state.positions, measurements.positions, self.stretch),
                "measurements": jnp.sum(flying, dtype=jnp.int32).astype(jnp.float32),
            }
        actor_observation, team_maps = observation.observe(
            t, measurements, updated.probability, stats.measured, self.budget, self.map_config, ages, team
        )
        links: Any = ()
        if self.num_agents > 1:
            links = communication.links(measurements.received, channel.delay if measurements.sent else jnp.int32(0))
        places = measurements.positions
        timestep = TimeStep(
            observation=actor_observation,
            action_mask=actions.boundary_mask(measurements.positions, self.num_actions),
            mask_state={"positions": places, "present": team.present} if self.has_teams else places,
            global_state={"maps": team_maps, "positions": measurements.positions},
            reward=jnp.broadcast_to(reward_now[:1], (self.num_agents,)),
            terminated=t == self.steps,
            truncated=jnp.bool_(False),
            first=t == 0,
            metrics={
                **reward.metrics(updated.sums, state.terrain.count, self.n),
                "return_abs": reward_now[1],
                **more_metrics,
            },
            present=team.present if self.has_teams else (),
            links=links,
        )
        state = dataclasses.replace(
            state, t=t, positions=measurements.positions, maps=updated, pending_reward=rewards, channel=channel
        )
        return state, timestep


@dataclasses.dataclass(frozen=True)
class CoverageBatch(BatchedEnvironment):
    """[B] missions: everything but the maps is vmapped; the map backend updates the maps."""

    env: Coverage

    lead_steps = 1  # the first step starts the missions, so that what both share is compiled once

    def _start(self, keys: Array, episode: Array, context: Any) -> tuple[BatchState, TimeStep]:
        states = self._draw_missions(keys, episode, context)
        states, timestep = self._advance(states, states.positions)
        return BatchState(env=states, key=keys, episode=episode), timestep

    def step_without_reset(self, state: BatchState, action: Array, context: Any) -> tuple[BatchState, TimeStep]:
        states, timestep = self._advance(*self._move(state, action, context))
        return dataclasses.replace(state, env=states), timestep

    def step(
        self, state: BatchState, previous: TimeStep, action: Array, context: Any = None
    ) -> tuple[BatchState, TimeStep]:
        """See `BatchedEnvironment.step`; all missions end together, and their first measurement is as all others."""

        def begin(zero: Array, moved: Any) -> Any:
            episode = state.episode + (zero + 1).astype(jnp.uint32)
            states = self._draw_missions(state.key, episode, context)
            return states, states.positions, episode

        moved = *self._move(state, action, context), state.episode
        states, positions, episode = when(previous.done[0], begin, moved)
        states, timestep = self._advance(states, positions)
        return BatchState(env=states, key=state.key, episode=episode), timestep

    def begin_episodes(self, keys: Array, context: Any, episode: Array | int = 0) -> tuple[BatchState, TimeStep]:
        """Return zeros whose time step has ended: the next step starts the missions."""

        def fill(shape: jax.ShapeDtypeStruct) -> Array:
            if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
                return jnp.broadcast_to(keys.reshape(-1)[0], shape.shape)
            return jnp.zeros(shape.shape, shape.dtype)

        state, timestep = jax.tree.map(fill, jax.eval_shape(self.reset, keys, context))
        state = dataclasses.replace(state, key=keys, episode=jnp.full(keys.shape, episode, jnp.uint32) - jnp.uint32(1))
        return state, dataclasses.replace(timestep, terminated=jnp.ones_like(timestep.terminated))

    def step_episodes(
        self, state: BatchState, previous: TimeStep, action: Array, context: Any
    ) -> tuple[BatchState, TimeStep]:
        return self.step(state, previous, action, context)

    def _move(self, state: BatchState, action: Array, context: Any) -> tuple[State, Array]:
        return jax.vmap(self.env._move, in_axes=(0, 0, None))(state.env, action, context)

    def _draw_missions(self, keys: Array, episode: Array, context: Any) -> State:
        return jax.vmap(lambda key, e: self.env._draw_mission(jax.random.fold_in(key, e), context))(keys, episode)

    @functools.partial(jax.jit, static_argnums=0)  # traced once, as `Coverage.observe_and_fuse`
    def _advance(self, states: State, positions: Array) -> tuple[State, TimeStep]:
        env = self.env
        *drawn, channel = jax.vmap(env._draw)(states, positions)
        measurements = env._measure(states, positions, *drawn)
        backend = maps.choose(env.map_backend, env.q, batched=True)
        updated, stats = backend.update_batch(env.map_config, states.maps, measurements)
        return jax.vmap(env._conclude)(states, measurements, updated, stats, channel)
