"""State and settings of a mission, shared by the environment, its scripted policies and its viewer."""

import dataclasses
import os
from typing import Any

import numpy as np

from envs_jax.base import Array, Environment, check_settings, closest, pytree, setting, short_repr, take_exactly
from envs_jax.coverage import actions, maps, raster, starts, terrain, world
from envs_jax.coverage.belief import P_MIN, Storage, Weights
from envs_jax.coverage.communication import ChannelConfig
from envs_jax.coverage.joining import Choices, Numbers
from envs_jax.coverage.maps.types import MapConfig, Maps
from envs_jax.coverage.terrain import Terrain

TERRAINS = (*terrain.FAMILIES, "mixed")
MAX_AGENTS = 12
MAX_Q = 200  # below 2 the lowest camera covers no cell
SMALL_Q = 7  # of the maps with which training may begin


@pytree
class State:
    """State of one mission.

    Attributes:
        key: key[], of the mission.
        t: int32[], steps made = index of the last measurement.
        comm_range: float32[], communication range in metres, divided by `CoverageConfig.stretch`.
        terrain: ground truth.
        positions: int32[A, 3], lattice positions (x / 5 m, y / 5 m, z / 5 m - 1).
        maps: local beliefs, the team's, and values derived from them.
        pending_reward: float32[2], reward and absolute reward for the last measurement.
        channel: a `communication.Channel` where `CoverageConfig.channel_config` is not None, else ().
        team: a `teams.Team` where `CoverageConfig.has_teams`, else ().
    """

    key: Array
    t: Array
    comm_range: Array
    terrain: Terrain
    positions: Array
    maps: Maps
    pending_reward: Array
    channel: Any = ()
    team: Any = ()


@dataclasses.dataclass(frozen=True)
class CoverageConfig(Environment):
    """Settings of a mission, and values derived from them. Raises ValueError: impossible settings."""

    num_agents: int = setting(4, "fly this many UAVs, 1 to 12", between=(1, MAX_AGENTS))
    team_sizes: tuple[int, ...] = setting(
        (),
        "draw the number of UAVs of each mission from these, at most num_agents; other places stay empty; empty = "
        "num_agents fly in every mission",
        between=(1, MAX_AGENTS),
    )
    loss_rate: float = setting(
        0.0, "let each UAV fail for the rest of its mission with this probability per step", between=(0, 1)
    )
    budget: int = setting(
        14, "let each UAV make this many moves after its first; a mission has budget + 1 steps", between=(1, 10_000)
    )
    q: int = setting(
        57,
        "divide the camera's footprint at 5 m altitude into q x q cells; more cells make larger maps (57: 493 x 493, "
        "7: 60 x 60)",
        between=(2, MAX_Q),
    )
    small_maps_first: float = setting(
        0.0,
        f"where q is larger, spend this share of the training, at its beginning, on missions with q = {SMALL_Q}, which "
        "cost little",
        between=(0, 1),
    )
    num_actions: int = setting(6, "give each UAV 4 moves (level), 6 (also up and down) or 27 (also diagonals)")
    communication_range: float = setting(25.0, "deliver messages between UAVs up to this distance, m", between=(0, 1e6))
    failure_rate: float | tuple[float, ...] = setting(
        0.0,
        "lose a message within range with this probability; several values, such as 0,0.1,0.3: each mission draws one",
        between=(0, 1),
    )
    delay: int | tuple[int, ...] = setting(
        0,
        "deliver messages this many steps after they were sent; several values, such as 0,1,3: each mission draws one",
        between=(0, 10_000),
    )
    channel_ramp: float = setting(
        0.0,
        "raise failure rates and delays linearly from 0 over this share of the training, in missions that begin then; "
        "0 = full from the start",
        between=(0, 1),
    )
    channel_metrics: bool = setting(
        False, "count each mission's messages: attempted, dropped, delivered, ...; always done where any are delayed"
    )
    mission_metrics: bool = setting(
        False,
        "also report the root mean square error of the team's map, the length of the team's path and the number of its "
        "measurements; the error takes one more pass over the map in every step",
    )
    show_ages: bool = setting(
        False, "add a plane to the observation for each UAV, which shows how old the last message from it is"
    )
    random_range: bool = setting(
        False, "draw the range of each mission from 0, 15, 25 and 100 m in place of communication_range"
    )
    prior: float = setting(
        0.5, "believe at first that each cell is of class 1 with this probability", between=(P_MIN, 1 - P_MIN)
    )
    class_weights: tuple[float, float] = setting(
        (0.0, 1.0), "weigh cells believed to be of class 0 and of class 1 by these in the reward", between=(0, 1e6)
    )
    unknown_weight: float = setting(0.5, "weigh cells of unknown class by this in the reward", between=(0, 1e6))
    reward: str = setting(
        "relative",
        "reward the relative loss of the weighted entropy of the team's map (relative), or the loss of the mean "
        "entropy over the true region, which is the score (region)",
        choices=("relative", "region"),
    )
    reward_scale: float = setting(
        22.0, "multiply the loss of entropy by this; the offset is added to it", between=(-1e6, 1e6)
    )
    reward_offset: float = setting(
        -0.5, "add this to the scaled loss of entropy; below 0, steps that learn little cost", between=(-1e6, 1e6)
    )
    terrain: str = setting(
        "split",
        f"draw the ground truth from this family: {', '.join(TERRAINS)}; or read it from this file, .npy or .png, "
        "whose raster is resampled to the map; more than 0.5 is the region of interest",
    )
    terrain_checksum: str = setting("", "SHA-256 and path of the terrain's file; filled in by the run", flag=False)
    area: float = setting(
        world.AREA,
        "edge of the area, m; a larger one stretches the lattice of 11 x 11 points, the altitudes and the footprints "
        "with it, but not communication_range",
        between=(0.1, 1e6),
    )
    start: str = setting(
        "uniform", f"start the UAVs at these positions: {', '.join(starts.NAMES)}", choices=starts.NAMES
    )
    reward_timing: str = setting(
        "aligned",
        "reward a step for the measurement that it causes (aligned), or for the previous one (original)",
        choices=("aligned", "original"),
    )
    belief_dtype: str = setting(
        "int16",
        "store the belief maps as int16 (half the memory; for a prior of 0.5) or as float32 (exact)",
        choices=("int16", "float32"),
    )
    map_backend: str = setting(
        "auto",
        f"update the maps by {', '.join(maps.BACKENDS)} (pallas: a kernel for GPUs); auto: by q on CPUs, pallas on "
        "NVIDIA GPUs from compute capability 8.0, else dense",
        choices=maps.BACKENDS,
    )

    def __post_init__(self) -> None:
        take_exactly(self)
        check_settings(self)
        self._take_terrain()
        if self.num_actions not in actions.MOVES:
            raise ValueError(f"coverage: num_actions is {self.num_actions}; choose 4, 6 or 27")
        if max(self.team_sizes, default=0) > self.num_agents:
            raise ValueError(
                f"coverage: team_sizes allows {max(self.team_sizes)} UAVs, but num_agents is {self.num_agents}; raise "
                "num_agents, or lower team_sizes"
            )

        for name in ("failure_rate", "delay"):
            if getattr(self, name) == ():
                raise ValueError(
                    f"coverage: {name} is an empty list; give one value, or several for missions to draw from"
                )
        if self.max_delay > self.budget:
            raise ValueError(
                f"coverage: with a delay of {self.max_delay} steps no message arrives in a mission of {self.steps} "
                f"steps; choose at most {self.budget}"
            )

    def _take_terrain(self) -> None:
        """Note the path of the terrain's file and what it holds. Raises ValueError."""
        ground = self.ground
        name = self.terrain
        checksum = ""
        if ground is not None:
            name = os.path.abspath(name)  # runs are resumed and evaluated from other folders, too
            checksum = f"{ground.checksum} {name}"
        elif name not in TERRAINS:
            raise ValueError(
                f"unknown terrain {short_repr(name)} (files end in {' or '.join(raster.SUFFIXES)}): "
                f"{closest(name, TERRAINS)}"
            )
        object.__setattr__(self, "terrain", name)
        object.__setattr__(self, "terrain_checksum", checksum)

    # Derived values

    @property
    def n(self) -> int:
        """Side of the maps in cells."""
        return world.map_side(self.q)

    @property
    def steps(self) -> int:
        return self.budget + 1

    @property
    def storage(self) -> Storage:
        return Storage(self.belief_dtype, self.prior)

    @property
    def weights(self) -> Weights:
        return Weights((self.class_weights[0], self.class_weights[1]), self.unknown_weight)

    @property
    def max_delay(self) -> int:
        """Longest delay of a mission, steps."""
        return max(self.delays)

    @property
    def failure_rates(self) -> tuple[float, ...]:
        """Shares of lost messages of which each mission has one."""
        return self.failure_rate if isinstance(self.failure_rate, tuple) else (self.failure_rate,)

    @property
    def delays(self) -> tuple[int, ...]:
        """Delays of messages, steps, of which each mission has one."""
        return self.delay if isinstance(self.delay, tuple) else (self.delay,)

    @property
    def has_teams(self) -> bool:
        """Whether some agents may be absent."""
        return bool(self.team_sizes) or self.loss_rate > 0

    @property
    def ground(self) -> raster.Raster | None:
        """The raster in the terrain's file, None where terrains are drawn. Raises ValueError."""
        if not self.terrain.lower().endswith(raster.SUFFIXES):
            return None
        path = os.path.abspath(self.terrain)
        ground = raster.load(path, self.n)
        if self.terrain_checksum.endswith(f" {path}") and self.terrain_checksum != f"{ground.checksum} {path}":
            raise ValueError(
                f"coverage: the terrain '{path}' has changed since these settings were made: put the former "
                "file back, or begin a new run"
            )
        return ground

    @property
    def stretch(self) -> float:
        """Edge of the area in units of the published one."""
        return self.area / world.AREA

    @property
    def counts_messages(self) -> bool:
        return self.channel_metrics or self.max_delay > 0

    @property
    def channel_config(self) -> ChannelConfig | None:
        """The settings of the missions' channels; None where `communication.draw_received` is all there is."""
        is_drawn = isinstance(self.failure_rate, tuple)
        is_ramped = self.channel_ramp > 0 and max(self.failure_rates) > 0
        if not (self.counts_messages or is_drawn or is_ramped or self.show_ages):
            return None
        return ChannelConfig(self.failure_rates, self.delays, self.steps, self.q)

    @property
    def numbers(self) -> Numbers:
        """The settings that the context may replace."""
        rates = np.asarray(self.failure_rates, np.float32)
        delays = np.asarray(self.delays, np.int32)
        sizes = np.asarray(self.team_sizes or (self.num_agents,), np.int32)
        return Numbers(
            num_agents=self.num_agents,
            failure_rates=Choices(rates, len(rates)),
            delays=Choices(delays, len(delays)),
            team_sizes=Choices(sizes, len(sizes)),
            loss_rate=self.loss_rate,
            comm_range=self.communication_range / self.stretch,
        )

    @property
    def map_config(self) -> MapConfig:
        tile = maps.tile(self.map_backend, self.n)
        return MapConfig(self.q, self.num_agents, self.storage, self.weights, tile)
