"""The GPU backend: Pallas kernels (Triton backend) that read and write each map once per update.

A program of `_sweep` takes a strip of 128 columns of one map from top to bottom: it updates tile after tile in place
and computes sums over the new map: over its cells in each of the 11 x 11 blocks that it overlaps and,
for the team's map, the sums of `types.Sums`. Footprints that miss a tile cost nothing. `_look` resizes one
agent's readings. Plain array code adds up the strips.

Maps are padded to whole tiles (`tile`); the padding is never measured nor counted. On
CPUs the kernels are interpreted, program after program: for tests only.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as triton

from envs_jax.base import Array
from envs_jax.coverage import sensor, world
from envs_jax.coverage import terrain as ground
from envs_jax.coverage.belief import PREDICTED, entropy_of_log_odds, probability
from envs_jax.coverage.maps import dense
from envs_jax.coverage.maps.fixed_point import FRACTION_BITS, carry
from envs_jax.coverage.maps.types import MapConfig, Maps, Measurements, Sums, UpdateStats
from envs_jax.coverage.sensor import Noise
from envs_jax.coverage.terrain import Terrain
from envs_jax.coverage.world import LATTICE, Box

_ROWS, _COLUMNS = 16, 128  # in a tile: whole 16-byte accesses, few cells of footprints' neighbourhoods
_SWEEP_WARPS = 8
_LOOK_WARPS = 4
_CHUNK = (16, 64)  # cells that `_look` handles at a time; `_SIDE` x `_SIDE` is the least a matrix product takes
_SIDE = 16

# What a program needs to know about an agent, int32 each, one after another in a row of words
_WORDS = ("top", "bottom", "left", "right", "start_row", "start_column", "level", "side",
          "limit", "gain0", "gain1", "seed0", "seed1")  # fmt: skip
_TERRAIN_WORDS = 9
_SUMS = 10


def tile(n: int) -> tuple[int, int]:
    """Return rows and columns of a tile of maps of side n."""
    return _ROWS, min(_COLUMNS, 1 << (n - 1).bit_length())


def compiles() -> bool:
    """Return whether this device runs the kernels: NVIDIA GPUs from compute capability 8.0 (Ampere)."""
    capability = str(getattr(jax.local_devices()[0], "compute_capability", ""))
    return jax.default_backend() == "gpu" and capability.replace(".", "", 1).isdigit() and float(capability) >= 8.0


def update(config: MapConfig, maps: Maps, measurements: Measurements) -> tuple[Maps, UpdateStats]:
    """Update the maps of one copy, leaves without batch axis; see the package."""
    batch = jax.tree.map(lambda leaf: leaf[None], (maps, measurements))
    return jax.tree.map(lambda leaf: leaf[0], update_batch(config, *batch))


def update_batch(config: MapConfig, maps: Maps, measurements: Measurements) -> tuple[Maps, UpdateStats]:
    """`update` of [B] copies; B is not vmapped but an axis of the kernels' grid."""
    words = jax.vmap(functools.partial(_words, config))(measurements)
    whole = _whole_maps(config, measurements)
    beliefs, local = _on_platform(functools.partial(_sweep, config, False), words, maps.beliefs, *whole)
    beliefs, team, strips = _on_platform(functools.partial(_sweep, config, True), words, beliefs, *whole)
    if isinstance(measurements.source, Noise):
        measured = _resize_readings(config, words, measurements.positions[..., 2], measurements.terrain)
    else:
        measured = jax.vmap(functools.partial(dense.resize_readings, config))(measurements)
    added = jnp.sum(strips, axis=1, dtype=strips.dtype)  # over the strips of the team's map
    sums = Sums(weighted=carry(added[:, 0:2]), interest=carry(added[:, 2:4]), counts=added[:, 6:10])
    resized = _resize(config, jnp.concatenate([local, team], axis=1))
    return Maps(beliefs, resized, sums, maps.overflow), UpdateStats(measured=measured, before=carry(added[:, 4:6]))


def _on_platform(kernel: Any, *arrays: Any) -> Any:
    """The kernel, compiled by Triton on GPUs, interpreted on CPUs."""
    cpu = functools.partial(kernel, interpret=True)
    gpu = functools.partial(kernel, interpret=False)
    return jax.lax.platform_dependent(*arrays, cpu=cpu, default=gpu)


# Arguments of programs


def _words(config: MapConfig, measurements: Measurements) -> Array:
    """int32[...]: all of one copy but its maps, see `_Copy`."""
    positions = measurements.positions
    agents = config.num_agents
    level = positions[:, 2]
    box = world.footprint(positions, config.cells_per_footprint)
    cut = world.clip_footprint(box, config.n)
    gains = jnp.take(jnp.asarray(config.storage.gains), level, axis=1, mode="clip")
    if config.storage.dtype == np.float32:
        gains = jax.lax.bitcast_convert_type(gains, jnp.int32)
    if isinstance(measurements.source, Noise):
        seeds = jax.lax.bitcast_convert_type(measurements.source.seeds, jnp.int32)[np.arange(agents) // 2]
    else:
        seeds = jnp.zeros((agents, 2), jnp.int32)
    values = {
        "top": cut.top, "bottom": cut.bottom, "left": cut.left, "right": cut.right,
        "start_row": box.top, "start_column": box.left, "level": level, "side": box.bottom - box.top,
        "limit": sensor.limit(level).astype(jnp.int32),
        "gain0": gains[0].astype(jnp.int32), "gain1": gains[1].astype(jnp.int32),
        "seed0": seeds[:, 0], "seed1": seeds[:, 1],
    }  # fmt: skip
    heard = jnp.concatenate([measurements.received & ~np.eye(agents, dtype=bool), jnp.ones((1, agents), jnp.bool_)])
    terrain = measurements.terrain
    return jnp.concatenate(
        [
            jnp.stack([values[name] for name in _WORDS], axis=-1).reshape(-1),
            heard.astype(jnp.int32).reshape(-1),
            terrain.rows.reshape(-1),
            terrain.columns.reshape(-1),
            terrain.invert.astype(jnp.int32)[None],
        ]
    )


@dataclasses.dataclass(frozen=True)
class _Copy:
    """The words of one copy in a program; agents and maps may be traced numbers."""

    config: MapConfig
    words: Any

    def word(self, agent: Any, name: str) -> Array:
        return self.words[agent * len(_WORDS) + _WORDS.index(name)]

    def box(self, agent: Any) -> Box:
        return Box(*(self.word(agent, name) for name in ("top", "bottom", "left", "right")))

    def terrain(self) -> Terrain:
        """The rectangles of the ground truth."""
        first = self.config.num_agents * len(_WORDS) + (self.config.num_agents + 1) * self.config.num_agents
        word = [self.words[first + k] for k in range(_TERRAIN_WORDS)]
        rows: Any = ((word[0], word[1]), (word[2], word[3]))
        columns: Any = ((word[4], word[5]), (word[6], word[7]))
        return Terrain(rows, columns, word[8] != 0, (), jnp.int32(0))

    def gains(self, agent: Any) -> tuple[Array, Array]:
        """dtype[]: the summands of a reading "class 0" and "class 1"."""
        storage = self.config.storage

        def decode(word: Array) -> Array:
            if storage.dtype == np.float32:
                return jax.lax.bitcast_convert_type(word, jnp.float32)
            return word.astype(storage.dtype)

        return decode(self.word(agent, "gain0")), decode(self.word(agent, "gain1"))

    def wrong(self, agent: Any, rows: Array, columns: Array) -> Array:
        """bool: `sensor.wrong` of cells of the map."""
        first, second = (
            jax.lax.bitcast_convert_type(self.word(agent, name), jnp.uint32) for name in ("seed0", "seed1")
        )
        bits = sensor.draw(first, second, rows * self.config.n + columns)
        return sensor.half(bits, agent).astype(jnp.int32) < self.word(agent, "limit")


def _whole_maps(config: MapConfig, measurements: Measurements) -> tuple[Array, ...]:
    """Return ground truth bits uint8 and recorded readings int8, if any, padded to whole tiles."""
    rows, columns = config.shape
    padded = []
    if not isinstance(measurements.terrain.bits, tuple):
        bits = ground.bit_array(measurements.terrain.bits)
        padded.append(jnp.pad(bits, ((0, 0), (0, rows // 8 - bits.shape[1]), (0, columns - config.n))))
    if not isinstance(measurements.source, Noise):
        missing = ((0, rows - config.n), (0, columns - config.n))
        padded.append(jnp.pad(measurements.source.astype(jnp.int8), ((0, 0), (0, 0), *missing)))
    return tuple(padded)


def _cells(shape: tuple[int, int], row: Any, column: Any) -> tuple[Array, Array]:
    """int32[k, 1] and int32[1, l]: rows and columns of a rectangle of cells that starts at (row, column)."""
    rows = row + jax.lax.broadcasted_iota(jnp.int32, (shape[0], 1), 0)
    return rows, column + jax.lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1)


def _unpack(bits: Array) -> Array:
    """bool[8 k, c] from uint8[k, c]: eight rows in one byte, the first in the lowest bit."""
    count, columns = bits.shape
    shape = (count, 8, columns)
    planes = jax.lax.broadcast_in_dim(bits.astype(jnp.int32), shape, (0, 2))
    planes = (planes >> jax.lax.broadcasted_iota(jnp.int32, shape, 1)) & 1
    return planes.reshape(count * 8, columns) == 1


# Maps


def _spans(n: int, length: int) -> int:
    """Most blocks of an axis of n cells, cut into 11, that `length` cells from a multiple of it on overlap."""
    starts = range(0, n, length)
    return max((min(s + length, n) * LATTICE - 1) // n - s * LATTICE // n + 1 for s in starts)


def _sweep(
    config: MapConfig, team: bool, words: Array, beliefs: Array, *whole: Array, interpret: bool
) -> tuple[Array, ...]:
    """Update beliefs, the team's map or the others, in place, and return them with sums over these M maps.

    These are float32[B, M, 11, tiles * spans], sums over cells by block of rows and by tile and block of columns; of
    the team's map, int32[B, tiles, 10], the sums of each strip.
    """
    n = config.n
    copies = words.shape[0]
    columns = tile(n)[1]
    height = config.shape[0]
    across = config.shape[1] // columns
    first, maps = (config.num_agents, 1) if team else (0, config.num_agents)
    spans = _spans(n, columns)
    strip = pl.BlockSpec((None, None, height, columns), lambda j, m, b: (b, first + m, 0, j))
    inputs = [pl.BlockSpec((None, words.shape[1]), lambda j, m, b: (b, 0)), strip]
    for array in whole:
        if array.ndim == 3:
            inputs.append(pl.BlockSpec((None, height // 8, columns), lambda j, m, b: (b, 0, j)))
        else:
            inputs.append(pl.BlockSpec((None, array.shape[1], height, columns), lambda j, m, b: (b, 0, 0, j)))
    outputs = [
        (strip, jax.ShapeDtypeStruct(beliefs.shape, beliefs.dtype)),
        (
            pl.BlockSpec((None, None, LATTICE, spans), lambda j, m, b: (b, m, 0, j)),
            jax.ShapeDtypeStruct((copies, maps, LATTICE, across * spans), jnp.float32),
        ),
    ]
    if team:
        sums_spec = pl.BlockSpec((None, None, _SUMS), lambda j, m, b: (b, j, 0))
        outputs.append((sums_spec, jax.ShapeDtypeStruct((copies, across, _SUMS), jnp.int32)))
    return pl.pallas_call(
        functools.partial(_sweep_strip, config, team),
        grid=(across, maps, copies),  # neighbours in memory first
        in_specs=inputs,
        out_specs=[spec for spec, _ in outputs],
        out_shape=[shape for _, shape in outputs],
        input_output_aliases={1: 0},
        compiler_params=triton.CompilerParams(num_warps=_SWEEP_WARPS, num_stages=1),
        interpret=interpret,
        name="coverage_team_map" if team else "coverage_local_maps",
    )(words, beliefs, *whole)


def _sweep_strip(config: MapConfig, team: bool, words: Any, old_map: Any, *references: Any) -> None:
    """Update a strip of columns of one map from top to bottom, tile by tile, and compute its sums."""
    inputs = len(references) - (3 if team else 2)
    bits = [reference for reference in references[:inputs] if len(reference.shape) == 2]
    readings = [reference for reference in references[:inputs] if len(reference.shape) == 3]
    new_map, blocks, *sums = references[inputs:]
    receiver = jnp.int32(config.num_agents) if team else pl.program_id(1)
    shape = tile(config.n)
    down = config.shape[0] // shape[0]
    column = pl.program_id(0) * shape[1]
    copy = _Copy(config, words)
    resized = _Resized(config.n, shape, column, blocks)

    def load(i: Any) -> Array:
        return old_map[pl.ds(i * shape[0], shape[0]), :]

    def one_tile(i: Array, state: Any) -> Any:
        old, read, added = state
        following = load(jnp.minimum(i + 1, down - 1))  # prefetched
        row = i * shape[0]
        tile_rows = pl.ds(row, shape[0])
        cells = _cells(shape, row, column)

        def truth() -> Array:
            value = ground.truth(copy.terrain(), *cells)
            return value | _unpack(bits[0][pl.ds(i * (shape[0] // 8), shape[0] // 8), :]) if bits else value

        def reads(agent: Any) -> Array:
            return readings[0][agent, tile_rows, :] != 0 if readings else truth() ^ copy.wrong(agent, *cells)

        def meets(agent: Any) -> Array:
            box = copy.box(agent)
            over = (box.top < row + shape[0]) & (box.bottom > row)
            return over & (box.left < column + shape[1]) & (box.right > column)

        new = _update_tile(config, copy, old, None if team else receiver, cells, meets, reads)
        new_map[tile_rows, :] = new
        read = resized.add(read, row, cells[0], probability(config.storage.log_odds(new)))
        if team:
            added = _add_cells(config, added, old, new, truth(), (cells[0] < config.n) & (cells[1] < config.n))
        return following, read, added

    nothing = jnp.zeros(shape, jnp.int32)
    state = load(0), (jnp.zeros(shape, jnp.float32), jnp.int32(0)), (nothing,) * 4 if team else ()
    _, read, added = jax.lax.fori_loop(jnp.int32(0), jnp.int32(down), one_tile, state)
    resized.write(*read)
    if team:  # three pairs (see `fixed_point.total`), then the counts as in `Sums`
        for k, cells in enumerate(added[:3]):
            for part, values in enumerate((cells >> 12, cells & 4095)):
                sums[0][2 * k + part] = jnp.sum(values, dtype=jnp.int32)
        for k in range(4):
            sums[0][6 + k] = jnp.sum((added[3] >> (8 * k)) & 255, dtype=jnp.int32)


def _update_tile(
    config: MapConfig, copy: _Copy, old: Array, receiver: Array | None, cells: Any, meets: Any, reads: Any
) -> Array:
    """Return a tile after the measurement of agent `receiver` (None: the team) and this time's messages."""
    storage = config.storage
    agents = config.num_agents

    def enter(agent: Any, whole_map: bool, state: tuple[Array, Array]) -> tuple[Array, Array]:
        value, touched = state
        inside = copy.box(agent).holds(*cells)
        gains = copy.gains(agent)
        change = jnp.where(reads(agent), gains[1], gains[0])
        value = jnp.where(inside, storage.fuse(value, change), storage.clip(value) if whole_map else value)
        return value, touched | inside

    def keep(state: Any) -> Any:
        return state

    state = storage.value(old), jnp.zeros(old.shape, jnp.bool_)
    if receiver is not None:
        state = jax.lax.cond(meets(receiver), functools.partial(enter, receiver, False), keep, state)
    late = jnp.bool_(False)  # whether the tile still has to be clipped for a message about cells elsewhere
    for sender in range(agents):
        heard = jnp.bool_(True) if receiver is None else copy.words[agents * (len(_WORDS) + receiver) + sender] != 0
        entered = heard & meets(sender)
        state = jax.lax.cond(entered, functools.partial(enter, sender, True), keep, state)
        late = (late | heard) & ~entered
    value, touched = state
    value = jax.lax.cond(late, storage.clip, keep, value)
    return jnp.where(touched | (old != storage.unseen), value, old)


@dataclasses.dataclass(frozen=True)
class _Resized:
    """Sums over the cells of a strip in each of the 11 blocks of rows and each block of columns that it overlaps.

    Cells count by 11 times their share in a block, along both axes. The state is (sums so far float32[tile], the block
    of rows they belong to); a block is written when the next one begins.
    """

    n: int
    shape: tuple[int, int]
    column: Array
    blocks: Any

    def share(self, block: Array, cell: Array) -> Array:
        """float32: 11 times the share of the cells that lies in a block of their axis."""
        low, high = jnp.maximum(LATTICE * cell, block * self.n), jnp.minimum(LATTICE * (cell + 1), (block + 1) * self.n)
        return jnp.maximum(high - low, 0).astype(jnp.float32)

    def first(self, cell: Array) -> Array:
        """int32[]: the block that a cell begins in."""
        return jax.lax.div(LATTICE * cell, jnp.int32(self.n))

    def add(self, state: Any, row: Array, rows: Array, values: Array) -> Any:
        """Return the state with a tile that starts at `row` added."""
        first = self.first(row)

        def begin(block: Array, state: Any) -> Any:
            self.write(*state)
            return jnp.zeros(self.shape, jnp.float32), block

        def enter(block: Array, state: Any) -> Any:
            sums, _ = jax.lax.cond(state[1] == block, lambda state: state, functools.partial(begin, block), state)
            return sums + values * self.share(block, rows), block

        state = enter(first, state)
        for k in range(1, _spans(self.n, self.shape[0])):
            block = first + k
            reached = (block * self.n < LATTICE * (row + self.shape[0])) & (block < LATTICE)
            state = jax.lax.cond(reached, functools.partial(enter, block), lambda state: state, state)
        return state

    def write(self, sums: Array, block: Array) -> None:
        """Write the sums of a block of rows."""
        line = self.column + jax.lax.iota(jnp.int32, self.shape[1])
        left = self.first(self.column)
        sums = jnp.sum(sums, axis=0)
        for k in range(_spans(self.n, self.shape[1])):
            self.blocks[block, k] = jnp.sum(sums * self.share(left + k, line))


def _to_fixed_point(values: Array) -> Array:
    """`fixed_point.to_fixed_point` of values in [0, 1] (Triton has no rounding to even)."""
    scaled = values * jnp.float32(2**FRACTION_BITS)
    below = jnp.floor(scaled)
    whole = below.astype(jnp.int32)
    rest = scaled - below
    return whole + ((rest > 0.5) | ((rest == 0.5) & (whole & 1 == 1))).astype(jnp.int32)


def _add_cells(config: MapConfig, added: Any, old: Array, new: Array, interest: Array, counted: Array) -> Any:
    """Add a tile of the team's map to a strip's cell-by-cell sums: three fixed-point numbers, and four counts."""
    storage = config.storage
    weight = jnp.where(counted, storage.weight(new, config.weights.relative), 0.0)
    entropy_old = entropy_of_log_odds(storage.log_odds(old))
    entropy_new = entropy_of_log_odds(storage.log_odds(new))
    interest &= counted
    fractions = (weight * entropy_new, jnp.where(interest, entropy_new, 0.0), weight * entropy_old)
    predicted = (storage.above(new, PREDICTED) & counted).astype(jnp.int32)
    seen = ((new != storage.unseen) & counted).astype(jnp.int32)
    increment = jnp.where(interest, jnp.int32(257), jnp.int32(1))  # 8 bits for each count
    counts = predicted * increment + ((seen * increment) << 16)
    sums = (cells + _to_fixed_point(values) for cells, values in zip(added[:3], fractions, strict=True))
    return *sums, added[3] + counts


def _resize(config: MapConfig, blocks: Array) -> Array:
    """float32[B, M, 11, 11] from the sums of the strips."""
    n = config.n
    columns = tile(config.n)[1]
    starts = np.arange(config.shape[1] // columns) * columns
    block = ((starts * LATTICE // n)[:, None] + np.arange(_spans(n, columns))[None]).reshape(-1, 1)
    matrix = (block == np.arange(LATTICE)[None]).astype(np.float32) / np.float32(n * n)
    return jnp.einsum("bmdc,ce->bmde", blocks, matrix, precision=jax.lax.Precision.HIGHEST)


# Readings


def _look_matrices(cells_per_footprint: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """Matrices float32[3, 16, cells] that resize footprints of the three altitudes, their units float32[3], and whether
    products with them are exact in any precision (they are small integers).
    """
    sides = [2 * radius for radius in world.radii(cells_per_footprint)]
    exact = min(sides) >= LATTICE
    columns = -(-max(sides) // _CHUNK[1]) * _CHUNK[1]
    matrices = np.zeros((world.LEVELS, _SIDE, columns), np.float32)
    units = np.ones(world.LEVELS, np.float32)
    for level, side in enumerate(sides):
        matrix = world.area_matrix(side)
        if exact:
            matrix, units[level] = np.round(matrix * side), 1.0 / side**2
        matrices[level, :LATTICE, :side] = matrix
    return matrices, units, exact


def _resize_readings(config: MapConfig, words: Array, level: Array, terrain: Terrain) -> Array:
    """float32[B, A, 11, 11]: see `UpdateStats.measured`."""
    _, units, _ = _look_matrices(config.cells_per_footprint)
    bits = () if isinstance(terrain.bits, tuple) else (terrain.bits,)
    sums = _on_platform(functools.partial(_look, config), words, *bits)
    unit = jnp.take(jnp.asarray(units), level, mode="clip")
    return sums[..., :LATTICE, :LATTICE] * unit[..., None, None]


def _look(config: MapConfig, words: Array, *bits: Array, interpret: bool) -> Array:
    """float32[B, A, 16, 16]: resized readings in the units of `_look_matrices`."""
    matrices, _, exact = _look_matrices(config.cells_per_footprint)
    copies = words.shape[0]
    agents = config.num_agents
    return pl.pallas_call(
        functools.partial(_look_at, config, exact),
        grid=(agents, copies),
        in_specs=[
            pl.BlockSpec((None, words.shape[1]), lambda a, b: (b, 0)),
            pl.BlockSpec(matrices.shape, lambda a, b: (0, 0, 0)),
            *(pl.BlockSpec((None, *array.shape[1:]), lambda a, b: (b, 0, 0)) for array in bits),
        ],
        out_specs=pl.BlockSpec((None, None, _SIDE, _SIDE), lambda a, b: (b, a, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((copies, agents, _SIDE, _SIDE), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=_LOOK_WARPS, num_stages=1),
        interpret=interpret,
        name="coverage_readings",
    )(words, jnp.asarray(matrices), *bits)


def _look_at(config: MapConfig, exact: bool, words: Any, matrices: Any, *references: Any) -> None:
    """Resize the readings of one agent, chunk of cells by chunk of cells."""
    *bits, out = references
    agent = pl.program_id(0)
    n = config.n
    copy = _Copy(config, words)
    box = copy.box(agent)
    level = copy.word(agent, "level")
    side = copy.word(agent, "side")
    start = copy.word(agent, "start_row"), copy.word(agent, "start_column")
    precision = jax.lax.Precision.DEFAULT if exact else jax.lax.Precision.HIGHEST

    def product(left: Array, right: Array, contract: int) -> Array:
        return jax.lax.dot_general(left, right, (((1,), (contract,)), ((), ())), precision=precision)

    def resize_chunk(i: Array, j: Array) -> Array:
        rows, columns = _cells(_CHUNK, start[0] + i * _CHUNK[0], start[1] + j * _CHUNK[1])
        truth = ground.truth(copy.terrain(), rows, columns)
        if bits:
            byte = bits[0][jnp.clip(rows, 0, n - 1) >> 3, jnp.clip(columns, 0, n - 1)].astype(jnp.int32)
            truth |= (byte >> (rows & 7)) & 1 == 1
        read = truth ^ copy.wrong(agent, rows, columns)
        sign = jnp.where(box.holds(rows, columns), jnp.where(read, jnp.float32(1.0), jnp.float32(-1.0)), 0.0)
        down = matrices[level, :, pl.ds(i * _CHUNK[0], _CHUNK[0])]
        across = matrices[level, :, pl.ds(j * _CHUNK[1], _CHUNK[1])]
        return product(product(down, sign, 0), across, 1)

    def add_chunk_row(i: Array, sums: Array) -> Array:
        return jax.lax.fori_loop(0, chunks[1], lambda j, sums: sums + resize_chunk(i, j), sums)

    chunks = [jax.lax.div(side + size - 1, jnp.int32(size)) for size in _CHUNK]
    out[...] = jax.lax.fori_loop(0, chunks[0], add_chunk_row, jnp.zeros((_SIDE, _SIDE), jnp.float32))
