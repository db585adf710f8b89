"""The mission: order of moves, measurements, messages and rewards.

Measurement index k counts the measurements of an agent: k = 0 is taken at the start, k = t + 1 after the move of step
t. The state at time t holds the local beliefs with everything up to the messages of time t fused in, and the team's
belief with measurements 0 to t of all agents. A step moves all agents at once, then every agent measures and enters its
own readings, then the messages of time t + 1 are fused, then the team's map. A mission has budget + 1 steps and never
ends earlier.
"""

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import (
    Array,
    Box,
    Discrete,
    Environment,
    EnvSpec,
    TimeStep,
    check_settings,
    closest,
    pytree,
    setting,
    shown,
)
from envs_jax.batch import BatchedEnvironment, BatchState
from envs_jax.coverage import (
    actions,
    baselines,
    communication,
    maps,
    metrics,
    observation,
    reward,
    sensor,
    starts,
    terrain,
    world,
)
from envs_jax.coverage.belief import Storage, Weights
from envs_jax.coverage.maps import Mapper, Maps, Report, Survey
from envs_jax.coverage.sensor import Noise
from envs_jax.coverage.terrain import Terrain
from envs_jax.stages import on_cpu

TERRAINS = (*terrain.FAMILIES, "mixed")
PATHS = {"paths_5": 0, "paths_10": 1, "paths_15": 2}  # where the lawn-mower of an altitude begins
STARTS = ("uniform", "corners", "original", *PATHS)
TIMINGS = ("aligned", "original")
DTYPES = ("int16", "float32")
MAX_AGENTS = 8
MAX_Q = 200


@pytree
class State:
    """State of one mission.

    Attributes:
        key: key[], of the mission.
        t: int32[], steps made = index of the last measurement.
        reach: float32[], communication range in metres.
        terrain: ground truth.
        positions: int32[A, 3], lattice positions (x / 5 m, y / 5 m, z / 5 m - 1).
        maps: local beliefs, the team's, and what is known of them.
        earned: float32[2], reward and absolute reward for the last measurement.
    """

    key: Array
    t: Array
    reach: Array
    terrain: Terrain
    positions: Array
    maps: Maps
    earned: Array


def _known(name: str, value: str, names: tuple[str, ...]) -> None:
    if value not in names:
        raise ValueError(f"coverage: unknown {name} {shown(value)}: {closest(str(value), names)}")


@dataclasses.dataclass(frozen=True)
class Coverage(Environment):
    """Multi-UAV terrain mapping. See the package's docstring for the source of the rules.

    Raises:
        ValueError: impossible settings.
    """

    num_agents: int = setting(4, "number of UAVs, 1 to 8", between=(1, MAX_AGENTS))
    budget: int = setting(
        14, "moves of each UAV after its first step; a mission has budget + 1 steps", between=(1, 10_000)
    )
    q: int = setting(
        57, "map resolution: cells along a footprint 5 m below the camera (57: 493 x 493 maps, 7: 60 x 60)"
    )
    num_actions: int = setting(6, "size of the action set: 4 (level), 6 (with up and down) or 27 (with diagonals)")
    communication_range: float = setting(25.0, "distance in metres up to which UAVs hear each other", between=(0, 1e6))
    failure_rate: float = setting(0.0, "chance that a message within range is lost", between=(0, 1))
    fix_range: bool = setting(True, "whether the range is the same in all missions (else 0, 15, 25 or 100 m)")
    prior: float = setting(0.5, "probability of class 1 that is believed of cells never seen")
    class_weights: tuple[float, float] = setting(
        (0.0, 1.0), "importance of cells believed to be of class 0 and 1", between=(0, 1e6)
    )
    unknown_weight: float = setting(0.5, "importance of cells of which nothing is believed", between=(0, 1e6))
    reward_scale: float = setting(
        22.0, "reward = scale x relative loss of weighted entropy + offset", between=(-1e6, 1e6)
    )
    reward_offset: float = setting(
        -0.5, "reward = scale x relative loss of weighted entropy + offset", between=(-1e6, 1e6)
    )
    terrain: str = setting("split", f"family of ground truth maps: {', '.join(TERRAINS)}")
    start: str = setting("uniform", f"where missions start: {', '.join(STARTS)}")
    reward_timing: str = setting(
        "aligned", "aligned: a step pays for the measurement it causes; original: for the one before it"
    )
    belief_dtype: str = setting(
        "int16", "storage of the belief maps: int16 (half the memory; for a prior of 0.5) or float32 (exact)"
    )
    map_engine: str = setting(
        "auto",
        f"how maps are updated: {', '.join(maps.ENGINES)} (pallas: for GPUs, not yet run on one); auto: by q on CPUs, "
        "elsewhere a new run takes dense or pallas, whichever is faster there",
    )

    version = 1
    baselines = baselines.BASELINES

    def __post_init__(self) -> None:
        check_settings(self)
        if not 2 <= self.q <= MAX_Q:
            raise ValueError(
                f"coverage: q is {self.q}; below 2 the lowest camera sees no cell, above {MAX_Q} maps get too large, "
                "so choose a q in between (57 is the published one, 7 is quick)"
            )
        if self.num_actions not in actions.MOVES:
            raise ValueError(f"coverage: num_actions is {self.num_actions}; choose 4, 6 or 27")
        if not 0.0 < self.prior < 1.0:
            raise ValueError(f"coverage: prior is {self.prior}; choose a probability between 0 and 1, without the ends")
        if len(self.class_weights) != 2:
            raise ValueError(f"coverage: class_weights {shown(self.class_weights)} must be two numbers")
        _known("terrain", self.terrain, TERRAINS)
        _known("start", self.start, STARTS)
        _known("reward_timing", self.reward_timing, TIMINGS)
        _known("belief_dtype", self.belief_dtype, DTYPES)
        _known("map_engine", self.map_engine, maps.ENGINES)
        if self.start == "corners" and self.num_agents > len(starts.CORNERS):
            raise ValueError(
                f"coverage: start 'corners' has places for {len(starts.CORNERS)} agents, not {self.num_agents}; "
                "choose start 'uniform' or fewer agents"
            )
        if not self.storage.fits():
            raise ValueError(
                f"coverage: prior is {self.prior}, too near to 0 or 1 for the range of the stored beliefs; "
                "choose one from 0.0001 to 0.9999"
            )

    # What follows from the settings

    @property
    def n(self) -> int:
        """Side of the maps in cells."""
        return world.map_side(self.q)

    @property
    def steps(self) -> int:
        """Steps of a mission."""
        return self.budget + 1

    @property
    def storage(self) -> Storage:
        return Storage(self.belief_dtype, self.prior)

    @property
    def weights(self) -> Weights:
        return Weights((self.class_weights[0], self.class_weights[1]), self.unknown_weight)

    @property
    def mapper(self) -> Mapper:
        tile = maps.tile(self.map_engine, self.n)
        return Mapper(self.q, self.num_agents, self.storage, self.weights, tile)

    @functools.cached_property
    def spec(self) -> EnvSpec:
        side, agents = world.LATTICE, self.num_agents
        return EnvSpec(
            name="coverage",
            num_agents=agents,
            observation=Box((side, side, observation.ACTOR_CHANNELS), low=0.0, high=1.0),
            action=Discrete(self.num_actions),
            horizon=self.steps,
            fixed_horizon=True,
            metrics={"entropy": "last", "f1": "last", "coverage": "last", "roi_coverage": "last", "return_abs": "sum"},
            labels={
                "entropy": "entropy in region, bit",
                "f1": "F1 score",
                "coverage": "share of map seen",
                "roi_coverage": "share of region seen",
                "return_abs": "return (absolute gain)",
            },
            global_state={
                "maps": Box((side, side, observation.TEAM_CHANNELS), low=0.0, high=1.0),
                "positions": Box((agents, 3), jnp.int32, low=0, high=side - 1),
            },
            critic_input_spec=Box((side, side, observation.CRITIC_CHANNELS), low=0.0, high=1.0),
            next_mask=functools.partial(_next_mask, num_actions=self.num_actions),
            critic_input=functools.partial(observation.critic_input, num_actions=self.num_actions),
            score="entropy",
            score_mode="min",
        )

    # The deterministic core: readings, messages and moves come from outside

    def begin(self, key: Array, ground: Terrain, positions: Array, reach: Array) -> State:
        """The state before the first measurement; follow with `observe_and_fuse`.

        Args:
            key: key[], of the mission.
            ground: ground truth.
            positions: int32[A, 3], start on the lattice.
            reach: float32[], communication range in metres.
        """
        return State(
            key=key,
            t=jnp.int32(-1),
            reach=reach,
            terrain=ground,
            positions=positions,
            maps=maps.empty(self.mapper, ground),
            earned=jnp.zeros((2,), jnp.float32),
        )

    @functools.partial(jax.jit, static_argnums=0)  # a reset and a step both end with it: it is traced once
    def observe_and_fuse(self, state: State, positions: Array, received: Array, source: Any) -> tuple[State, TimeStep]:
        """All agents measure at `positions`, fuse what they receive, and time goes on by one.

        Args:
            state: of the time before (t = -1: from `begin`).
            positions: int32[A, 3], lattice positions after the move.
            received: bool[A, A], [i, j] = agent i receives the message of agent j.
            source: `sensor.Noise`, or readings bool[A, n, n] (true = read as class 1; read inside footprints only).
        """
        survey = Survey(state.terrain, positions, received, source)
        updated, report = self._engine(batched=False).update(self.mapper, state.maps, survey)
        return self._conclude(state, survey, updated, report)

    # Environment

    def reset(self, key: Array, context: Any) -> tuple[State, TimeStep]:
        state = self._draw_mission(key)
        return self.observe_and_fuse(state, state.positions, *self._draw(state, state.positions))

    def step(self, state: State, action: Array, context: Any) -> tuple[State, TimeStep]:
        positions = actions.move(state.positions, action, self.num_actions)
        return self.observe_and_fuse(state, positions, *self._draw(state, positions))

    def batched(self) -> BatchedEnvironment:
        """The batch that `envs_jax.batch.batched` makes of this environment."""
        return CoverageBatch(self)

    def variants(self) -> tuple[Mapping[str, Any], ...]:
        if self.map_engine != "auto" or on_cpu():
            return ()
        return {"map_engine": "dense"}, {"map_engine": "pallas"}

    def shared(self, state: State) -> tuple[Array, Array]:
        beliefs = state.maps.beliefs[..., : self.n, : self.n]
        if beliefs.dtype == jnp.float32:  # stored beliefs are exact in either form
            beliefs = jax.lax.bitcast_convert_type(beliefs, jnp.int32)
        return beliefs, state.maps.sums.counts

    def portable(self) -> "Coverage":
        interpreted = self.map_engine == "pallas" and on_cpu()
        return dataclasses.replace(self, map_engine="auto") if interpreted else self

    def moment(self, step: int) -> str:
        return f"{step + 1} measurement{'s' if step else ''}"

    def viewer(self) -> Any:
        from envs_jax.coverage.viewer import CoverageViewer

        return CoverageViewer()

    # Parts

    def _engine(self, batched: bool) -> types.ModuleType:
        name = self.map_engine
        if name == "auto":  # single copies may be vmapped, where windows lose their branches
            windows = batched and on_cpu() and self.q >= maps.WINDOWS_FROM
            name = "windows" if windows else "dense"
        return maps.engine(name)

    def _draw_mission(self, key: Array) -> State:
        """Terrain, start and range of the mission of `key`."""
        key_terrain, key_start, key_range = jax.random.split(key, 3)
        if self.terrain == "split" and self.start == "original":
            ground = terrain.split(*starts.original_split(starts.mission_number(key)), self.n)
        else:
            families = terrain.FAMILIES if self.terrain == "mixed" else (self.terrain,)
            ground = terrain.draw(key_terrain, families, self.n)
        if self.start == "uniform":
            positions = starts.uniform(key_start, self.num_agents)
        elif self.start == "corners":
            positions = starts.corners(self.num_agents)
        elif self.start in PATHS:
            positions = baselines.lawnmower_start(self.num_agents, PATHS[self.start])
        else:
            positions = starts.original(starts.mission_number(key), self.num_agents)
        reach = jnp.float32(self.communication_range)
        if not self.fix_range:
            reach = jax.random.choice(key_range, jnp.asarray(communication.RANGES, jnp.float32))
        return self.begin(key, ground, positions, reach)

    def _draw(self, state: State, positions: Array) -> tuple[Array, Noise]:
        """Messages received and noise of the readings of the measurement that follows `state`."""
        index = state.t + 1
        links = communication.delivered(state.key, index, self.num_agents, self.failure_rate)
        received = communication.received(positions, state.reach, links)
        return received, sensor.noise(state.key, index, self.num_agents)

    def _conclude(self, state: State, survey: Survey, updated: Maps, report: Report) -> tuple[State, TimeStep]:
        """The new state and its time step, once the maps are updated."""
        t = state.t + 1
        earned = jnp.stack(
            [
                reward.relative(report.before, updated.sums.weighted, self.reward_scale, self.reward_offset),
                reward.absolute(report.before, updated.sums.weighted, self.n, self.weights),
            ]
        )
        paid = earned if self.reward_timing == "aligned" else state.earned
        paid = jnp.where(t > 0, paid, jnp.zeros_like(paid))
        seen, team = observation.observe(
            t,
            survey.positions,
            survey.received,
            updated.probability,
            report.measured,
            total=self.budget,
            q=self.q,
            weights=self.weights,
        )
        timestep = TimeStep(
            observation=seen,
            action_mask=actions.boundary_mask(survey.positions, self.num_actions),
            mask_state=survey.positions,
            global_state={"maps": team, "positions": survey.positions},
            reward=jnp.broadcast_to(paid[:1], (self.num_agents,)),
            terminated=t == self.steps,
            truncated=jnp.bool_(False),
            first=t == 0,
            metrics={**metrics.measure(updated.sums, state.terrain.count, self.n), "return_abs": paid[1]},
        )
        state = dataclasses.replace(state, t=t, positions=survey.positions, maps=updated, earned=earned)
        return state, timestep


def _next_mask(mask_state: Array, action_mask: Array, chosen: Array, agent: Array, *, num_actions: int) -> Array:
    return actions.next_mask(mask_state, action_mask, chosen, agent, num_actions)


@dataclasses.dataclass(frozen=True)
class CoverageBatch(BatchedEnvironment):
    """[B] missions: everything small is vmapped, the maps are left to the engine."""

    @property
    def _coverage(self) -> Coverage:
        assert isinstance(self.env, Coverage)
        return self.env

    def _start(self, keys: Array, episode: Array, context: Any) -> tuple[BatchState, TimeStep]:
        env = self._coverage
        states = jax.vmap(lambda key, e: env._draw_mission(jax.random.fold_in(key, e)))(keys, episode)
        states, timestep = self._advance(states, states.positions)
        return BatchState(env=states, key=keys, episode=episode), timestep

    def play(self, state: BatchState, action: Array, context: Any) -> tuple[BatchState, TimeStep]:
        env = self._coverage
        positions = jax.vmap(functools.partial(actions.move, num_actions=env.num_actions))(state.env.positions, action)
        states, timestep = self._advance(state.env, positions)
        return dataclasses.replace(state, env=states), timestep

    @functools.partial(jax.jit, static_argnums=0)  # traced once, as `Coverage.observe_and_fuse`
    def _advance(self, states: State, positions: Array) -> tuple[State, TimeStep]:
        env = self._coverage
        received, source = jax.vmap(env._draw)(states, positions)
        survey = Survey(states.terrain, positions, received, source)
        updated, report = env._engine(batched=True).update_batch(env.mapper, states.maps, survey)
        return jax.vmap(env._conclude)(states, survey, updated, report)
