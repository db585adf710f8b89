"""The GPU backend: Pallas kernels (Triton backend) that visit the tiles of a map that an update changes.

A program of `_sweep` looks at a strip of tiles of one map from top to bottom. It visits those that a footprint meets,
and those with cells beyond the clip where a message clips the whole map: it updates their cells in place, and what
`Tiles` keeps of them. All other tiles stay as they are, and cost nothing but the question. Programs of the team's map
also add up by how much the visited cells change the sums of `types.Sums`, in integers, so that running sums equal
recomputed ones. `_look` resizes one agent's readings.

Maps are padded to whole tiles (`tile`); the padding is never measured nor counted. On CPUs the kernels are interpreted,
program after program: for tests only.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as triton

from envs_jax.base import Array
from envs_jax.coverage import sensor, world
from envs_jax.coverage import terrain as ground
from envs_jax.coverage.belief import KNOWN, PREDICTED, entropy_of_log_odds, probability
from envs_jax.coverage.maps import dense
from envs_jax.coverage.maps.fixed_point import FRACTION_BITS, carry, to_fixed_point
from envs_jax.coverage.maps.tiles import Tiles, Tiling
from envs_jax.coverage.maps.types import MapConfig, Maps, Measurements, Sums, UpdateStats
from envs_jax.coverage.raster import Raster
from envs_jax.coverage.sensor import Noise
from envs_jax.coverage.terrain import Terrain
from envs_jax.coverage.world import LATTICE, Box

# Cells of a tile that one warp handles: whole 32-byte sectors, 8 cells a thread, and sums without a barrier. Of the
# sizes tried in programs for an H200 this one takes the fewest instructions, as few cells lie outside of footprints.
_ROWS, _COLUMNS = 8, 32
_MOST_TILES = 127  # from top to bottom, see `_write_changes`
_SWEEP_WARPS = 1
_LOOK_WARPS = 4
_CHUNK = (16, 64)  # cells that `_look` handles at a time; `_SIDE` x `_SIDE` is the least a matrix product takes
_SIDE = 16

# What a program needs to know about a reading, int32 each, one after another in a row of words
_WORDS = ("top", "bottom", "left", "right", "start_row", "start_column", "level", "side",
          "limit", "gain0", "gain1", "seed0", "seed1")  # fmt: skip
_TERRAIN_WORDS = 9
_PAIRS = 3  # sums of entropies: `Sums.weighted`, `Sums.interest` and `UpdateStats.before`
_COUNTS = 4


def tile(n: int) -> tuple[int, int]:
    """Return rows and columns of a tile of maps of side n; both are powers of two, as Triton demands."""
    rows = _ROWS
    while rows * _MOST_TILES < n:
        rows *= 2
    return rows, min(_COLUMNS, 1 << (n - 1).bit_length())


def update(config: MapConfig, maps: Maps, measurements: Measurements) -> tuple[Maps, UpdateStats]:
    """Update the maps of one copy, leaves without batch axis; see the package."""
    batch = jax.tree.map(lambda leaf: leaf[None], (maps, measurements))
    return jax.tree.map(lambda leaf: leaf[0], update_batch(config, *batch))


def update_batch(config: MapConfig, maps: Maps, measurements: Measurements) -> tuple[Maps, UpdateStats]:
    """`update` of [B] copies; B is not vmapped but an axis of the kernels' grid."""
    words = jax.vmap(functools.partial(_words, config))(measurements)
    whole = _whole_maps(config, measurements)
    state = maps.beliefs, maps.tiles.blocks, maps.tiles.beyond
    state = _on_platform(functools.partial(_sweep, config, False), words, *state, whole)
    *state, strips = _on_platform(functools.partial(_sweep, config, True), words, *state, whole)
    beliefs, blocks, beyond = state
    if isinstance(measurements.source, Noise):
        measured = _resize_readings(config, words, measurements.positions[..., 2], measurements.terrain)
    else:
        measured = jax.vmap(functools.partial(dense.resize_readings, config))(measurements)
    changes = jnp.sum(strips, axis=1, dtype=strips.dtype)  # over the strips of the team's map
    pairs = changes[:, : 2 * _PAIRS].reshape(-1, _PAIRS, 2)
    old = maps.sums
    sums = Sums(
        weighted=carry(old.weighted + pairs[:, 0]),
        interest=carry(old.interest + pairs[:, 1]),
        counts=old.counts + changes[:, 2 * _PAIRS :],
    )
    before = carry(old.weighted + pairs[:, 2])
    new = Maps(beliefs, config.tiling.resize(blocks), sums, maps.overflow, Tiles(blocks, beyond))
    return new, UpdateStats(measured=measured, before=before)


def _on_platform(kernel: Any, *arrays: Any) -> Any:
    """The kernel, compiled by Triton on GPUs, interpreted on CPUs."""
    cpu = functools.partial(kernel, interpret=True)
    gpu = functools.partial(kernel, interpret=False)
    return jax.lax.platform_dependent(*arrays, cpu=cpu, default=gpu)


# Arguments of programs


def _words(config: MapConfig, measurements: Measurements) -> Array:
    """int32[...]: all of one copy but its maps, see `_Copy`."""
    agents = config.num_agents
    everyone = isinstance(measurements.present, tuple)
    present = jnp.ones(agents, jnp.bool_) if everyone else measurements.present
    rows = [_describe_readings(config, measurements.positions, measurements.source, present)]
    if measurements.sent:
        sent = measurements.messages
        rows.append(_describe_readings(config, sent.positions, sent.source, jnp.ones(agents, jnp.bool_)))
    heard = jnp.concatenate([measurements.received & ~np.eye(agents, dtype=bool), present[None]])
    terrain = measurements.terrain
    return jnp.concatenate(
        [
            *(row.reshape(-1) for row in rows),
            heard.astype(jnp.int32).reshape(-1),
            terrain.rows.reshape(-1),
            terrain.columns.reshape(-1),
            terrain.invert.astype(jnp.int32)[None],
        ]
    )


def _describe_readings(config: MapConfig, positions: Array, source: Any, present: Array) -> Array:
    """int32[A, 13]: `_WORDS` of each agent's reading; nothing is measured by agents that are not `present`."""
    level = positions[:, 2]
    box = world.footprint(positions, config.cells_per_footprint)
    cut = jax.tree.map(lambda bound: jnp.where(present, bound, 0), world.clip_footprint(box, config.n))
    gains = jnp.take(jnp.asarray(config.storage.gains), level, axis=1, mode="clip")
    if config.storage.dtype == np.float32:
        gains = jax.lax.bitcast_convert_type(gains, jnp.int32)
    if isinstance(source, Noise):
        seeds = jax.lax.bitcast_convert_type(source.seeds, jnp.int32)[np.arange(config.num_agents) // 2]
    else:
        seeds = jnp.zeros((config.num_agents, 2), jnp.int32)
    values = {
        "top": cut.top, "bottom": cut.bottom, "left": cut.left, "right": cut.right,
        "start_row": box.top, "start_column": box.left, "level": level, "side": box.bottom - box.top,
        "limit": sensor.limit(level).astype(jnp.int32),
        "gain0": gains[0].astype(jnp.int32), "gain1": gains[1].astype(jnp.int32),
        "seed0": seeds[:, 0], "seed1": seeds[:, 1],
    }  # fmt: skip
    return jnp.stack([values[name] for name in _WORDS], axis=-1)


@dataclasses.dataclass(frozen=True)
class _Copy:
    """The words of one copy in a program.

    Reading r is what agent r measures now; where messages are delayed, reading A + r is what its message holds.
    """

    config: MapConfig
    words: Any

    @property
    def readings(self) -> int:
        """A or 2 A, the number of readings."""
        agents = self.config.num_agents
        return (self.words.shape[0] - _TERRAIN_WORDS - (agents + 1) * agents) // len(_WORDS)

    def word(self, reading: Any, name: str) -> Array:
        return self.words[reading * len(_WORDS) + _WORDS.index(name)]

    def box(self, reading: Any) -> Box:
        return Box(*(self.word(reading, name) for name in ("top", "bottom", "left", "right")))

    def hears(self, receiver: Any, sender: int) -> Array:
        """Return whether a map takes what a sender's message holds, bool[]; map A is the team's."""
        first = self.readings * len(_WORDS)
        return self.words[first + self.config.num_agents * receiver + sender] != 0

    def terrain(self) -> Terrain:
        """The rectangles of the ground truth."""
        first = self.words.shape[0] - _TERRAIN_WORDS
        word = [self.words[first + k] for k in range(_TERRAIN_WORDS)]
        rows: Any = ((word[0], word[1]), (word[2], word[3]))
        columns: Any = ((word[4], word[5]), (word[6], word[7]))
        return Terrain(rows, columns, word[8] != 0, (), jnp.int32(0))

    def gains(self, reading: Any) -> tuple[Array, Array]:
        """dtype[]: the summands of a reading "class 0" and "class 1"."""
        storage = self.config.storage

        def decode(word: Array) -> Array:
            if storage.dtype == np.float32:
                return jax.lax.bitcast_convert_type(word, jnp.float32)
            return word.astype(storage.dtype)

        return decode(self.word(reading, "gain0")), decode(self.word(reading, "gain1"))

    def wrong(self, reading: Any, rows: Array, columns: Array) -> Array:
        """bool: `sensor.wrong` of cells of the map."""
        first, second = (
            jax.lax.bitcast_convert_type(self.word(reading, name), jnp.uint32) for name in ("seed0", "seed1")
        )
        bits = sensor.draw(first, second, rows * self.config.n + columns)
        agent = reading % self.config.num_agents if self.readings > self.config.num_agents else reading
        return sensor.half(bits, agent).astype(jnp.int32) < self.word(reading, "limit")


def _whole_maps(config: MapConfig, measurements: Measurements) -> dict[str, Array]:
    """Return what is stored by cell, padded to whole tiles, of what there is.

    Returns:
        "bits": ground truth uint8[B or 1, rows / 8, columns]; "recorded": readings int8[B, A or 2 A, rows, columns].
    """
    rows, columns = config.shape
    whole = {}
    if (bits := _ground_bits(measurements.terrain)) is not None:
        whole["bits"] = jnp.pad(bits, ((0, 0), (0, rows // 8 - bits.shape[1]), (0, columns - config.n)))
    if not isinstance(measurements.source, Noise):
        recorded = [measurements.source, *([measurements.sent.source] if measurements.sent else [])]
        missing = ((0, 0), (0, 0), (0, rows - config.n), (0, columns - config.n))
        whole["recorded"] = jnp.pad(jnp.concatenate(recorded, axis=1).astype(jnp.int8), missing)
    return whole


def _ground_bits(terrain: Terrain) -> Array | None:
    """Return the ground truth uint8[B, n / 8, n] of the copies, [1, ...] if they share it; None without any."""
    if isinstance(terrain.bits, tuple):
        return None
    return ground.bit_array(terrain.bits)[None] if isinstance(terrain.bits, Raster) else terrain.bits


def _by_copy(shared: bool, copy: Any) -> Any:
    """Return the index of a copy's row along an axis that all copies may share."""
    return 0 if shared else copy


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


def _sweep(
    config: MapConfig,
    team: bool,
    words: Array,
    beliefs: Array,
    blocks: Array,
    beyond: Array,
    whole: dict[str, Array],
    interpret: bool,
) -> tuple[Array, ...]:
    """Update the team's map or the others in place. Return beliefs, `Tiles.blocks`, `Tiles.beyond` of all maps.

    Of the team's map also int32[B, strips, 10], by how much each strip changes the sums, see `_write_changes`.
    """
    tiling = config.tiling
    copies = words.shape[0]
    height = config.shape[0]
    first, maps = (config.num_agents, 1) if team else (0, config.num_agents)

    def of_map(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda j, m, b: (b, first + m, 0, j))

    state = [
        of_map(height, tiling.columns),
        of_map(tiling.down * tiling.row_spans, tiling.column_spans),
        of_map(tiling.down, 1),
    ]
    inputs = [pl.BlockSpec((None, words.shape[1]), lambda j, m, b: (b, 0)), *state]
    arrays = dict(whole)
    if "bits" in whole:
        shared = len(whole["bits"]) == 1
        strip = (None, height // 8, tiling.columns)
        inputs.append(pl.BlockSpec(strip, lambda j, m, b: (_by_copy(shared, b), 0, j)))
    if "recorded" in whole:
        strips = (None, whole["recorded"].shape[1], height, tiling.columns)
        inputs.append(pl.BlockSpec(strips, lambda j, m, b: (b, 0, 0, j)))
    if team and config.storage.name == "int16":
        arrays["entropies"] = _tabulate_entropies(config)
        inputs.append(pl.BlockSpec(arrays["entropies"].shape, lambda j, m, b: (0,)))
    outputs = list(state)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (beliefs, blocks, beyond)]
    if team:
        outputs.append(pl.BlockSpec((None, None, 2 * _PAIRS + _COUNTS), lambda j, m, b: (b, j, 0)))
        shapes.append(jax.ShapeDtypeStruct((copies, tiling.across, 2 * _PAIRS + _COUNTS), jnp.int32))
    return pl.pallas_call(
        functools.partial(_sweep_strip, config, team, tuple(arrays)),
        grid=(tiling.across, maps, copies),  # neighbours in memory first
        in_specs=inputs,
        out_specs=outputs,
        out_shape=shapes,
        input_output_aliases={1: 0, 2: 1, 3: 2},
        compiler_params=triton.CompilerParams(num_warps=_SWEEP_WARPS, num_stages=1),
        interpret=interpret,
        name="coverage_team_map" if team else "coverage_local_maps",
    )(words, beliefs, blocks, beyond, *arrays.values())


def _sweep_strip(
    config: MapConfig, team: bool, names: Sequence[str], words: Any, old_map: Any, _: Any, old_beyond: Any, *others: Any
) -> None:
    """Update a strip of tiles of one map from top to bottom, and what is kept of them.

    Args:
        config: of the maps.
        team: whether the map is the team's.
        names: of the inputs that follow `old_beyond`, as in `_whole_maps`, and "entropies".
        words, old_map, _, old_beyond: inputs, see `_sweep`; the third one is only written.
        others: the named inputs, then the outputs.
    """
    by_name = dict(zip(names, others, strict=False))
    new_map, blocks, beyond, *changes = others[len(names) :]
    storage = config.storage
    agents = config.num_agents
    tiling = config.tiling
    shape = tiling.rows, tiling.columns
    column = pl.program_id(0) * tiling.columns
    receiver = jnp.int32(agents) if team else pl.program_id(1)
    copy = _Copy(config, words)
    # agents hear what messages hold; the team's map takes what is measured now
    messages = range(agents) if team else range(copy.readings - agents, copy.readings)
    heard = [copy.hears(receiver, sender) for sender in range(agents)]
    sources = [*(zip(messages, heard, strict=True)), *([] if team else [(receiver, jnp.bool_(True))])]
    boxes = [copy.box(reading) for reading, _ in sources]
    columns_meet = [
        enters & (box.left < column + shape[1]) & (box.right > column)
        for box, (_, enters) in zip(boxes, sources, strict=True)
    ]
    # whether a message clips cells that no footprint meets
    late = functools.reduce(jnp.logical_or, heard) & (_find_most(old_beyond, tiling.down) != 0)

    def visit(i: Array, meets: Sequence[Array], added: Any) -> Any:
        row = i * shape[0]
        tile_rows = pl.ds(row, shape[0])
        cells = _cells(shape, row, column)

        def truth() -> Array:
            value = ground.truth(copy.terrain(), *cells)
            if "bits" in by_name:
                value |= _unpack(by_name["bits"][pl.ds(i * (shape[0] // 8), shape[0] // 8), :])
            return value

        def enter(k: int, whole_map: bool, state: tuple[Array, Array]) -> tuple[Array, Array]:
            (reading, _), (value, touched) = sources[k], state
            if "recorded" in by_name:
                read = by_name["recorded"][reading, tile_rows, :] != 0
            else:
                read = truth() ^ copy.wrong(reading, *cells)
            inside = boxes[k].holds(*cells)
            gains = copy.gains(reading)
            change = jnp.where(read, gains[1], gains[0])
            value = jnp.where(inside, storage.fuse(value, change), storage.clip(value) if whole_map else value)
            return value, touched | inside

        old = old_map[tile_rows, :]
        state = storage.value(old), jnp.zeros(shape, jnp.bool_)
        if not team:  # first its own measurement
            state = _call_if(meets[agents], functools.partial(enter, agents, False), state)
        unclipped = jnp.bool_(False)  # whether the tile still has to be clipped for a message about cells elsewhere
        for k in range(agents):
            state = _call_if(meets[k], functools.partial(enter, k, True), state)
            unclipped = (unclipped | heard[k]) & ~meets[k]
        value, touched = state
        value = _call_if(unclipped, storage.clip, value)
        new = jnp.where(touched | (old != storage.unseen), value, old)
        new_map[tile_rows, :] = new
        exceeds = jnp.abs(storage.value(new)) > storage.limit
        beyond[i, 0] = jnp.max(exceeds.astype(jnp.int32))
        _write_blocks(config, blocks, i, column, cells[0], probability(storage.log_odds(new)))
        return _add_changes(config, added, old, new, truth(), by_name.get("entropies")) if team else added

    def consider(i: Array, added: Any) -> Any:
        row = i * shape[0]
        meets = [
            across & (box.top < row + shape[0]) & (box.bottom > row)
            for box, across in zip(boxes, columns_meet, strict=True)
        ]
        changes = functools.reduce(jnp.logical_or, meets) | (late & (old_beyond[i, 0] != 0))
        return jax.lax.cond(changes, functools.partial(visit, i, meets), lambda added: added, added)

    nothing = (jnp.zeros(shape, jnp.int32),) * (_PAIRS + 1) if team else ()
    first, end = _find_range(boxes, columns_meet, tiling)
    first = jnp.where(late, jnp.int32(0), first)
    end = jnp.where(late, jnp.int32(tiling.down), end)
    added = jax.lax.fori_loop(first, end, consider, nothing)
    if team:
        _write_changes(changes[0], added)


def _find_most(flags: Any, count: int) -> Array:
    """int32[]: the largest of `count` numbers in the first column; Triton reads a power of two of them."""
    rows = jax.lax.iota(jnp.int32, 1 << (count - 1).bit_length())
    return jnp.max(flags[jnp.minimum(rows, count - 1), 0])


def _find_range(boxes: Sequence[Box], columns_meet: Sequence[Array], tiling: Tiling) -> tuple[Array, Array]:
    """Return the first tile of a strip that a footprint meets, and the one after the last; the same without any."""
    first = jnp.int32(tiling.down)
    end = jnp.int32(0)
    for box, across in zip(boxes, columns_meet, strict=True):
        meets = across & (box.bottom > box.top)
        first = jnp.minimum(first, jnp.where(meets, jax.lax.div(box.top, jnp.int32(tiling.rows)), first))
        end = jnp.maximum(end, jnp.where(meets, jax.lax.div(box.bottom - 1, jnp.int32(tiling.rows)) + 1, end))
    return jnp.minimum(first, end), end


def _call_if(condition: Array, function: Callable[[Any], Any], state: Any) -> Any:
    return jax.lax.cond(condition, function, lambda state: state, state)


def _write_blocks(config: MapConfig, blocks: Any, i: Array, column: Array, rows: Array, values: Array) -> None:
    """Write `Tiles.blocks` of tile i of the strip at `column`, from the probabilities of its cells."""
    tiling = config.tiling
    line = column + jax.lax.iota(jnp.int32, tiling.columns)
    top, left = tiling.first_block(i * tiling.rows), tiling.first_block(column)
    for r in range(tiling.row_spans):
        sums = jnp.sum(values * tiling.share(top + r, rows), axis=0)
        for c in range(tiling.column_spans):
            blocks[i * tiling.row_spans + r, c] = jnp.sum(sums * tiling.share(left + c, line))


# Changes of the sums over the team's map


def _tabulate_entropies(config: MapConfig) -> Array:
    """int32[4 (limit + 1)]: fixed-point entropies of cells that store 0, 1, ..., `limit` (or minus that).

    They are weighted as cells that count as class 1, as class 0 and as unknown, and not at all.
    """
    storage, weights = config.storage, config.weights.relative
    entropy = storage.entropy(jnp.arange(int(storage.limit) + 1, dtype=storage.dtype))
    rows = [*(jnp.float32(weight) * entropy for weight in (weights.classes[1], weights.classes[0], weights.unknown))]
    return to_fixed_point(jnp.concatenate([*rows, entropy]))


def _add_changes(config: MapConfig, added: Any, old: Array, new: Array, interest: Array, table: Any) -> Any:
    """Add by how much a tile's cells change the sums: three fixed-point numbers, and four counts in one number."""
    storage = config.storage

    if table is None:

        def weigh(weighted_as: Array, stored: Array) -> Array:
            weight = storage.weight(weighted_as, config.weights.relative)
            return _to_fixed_point(weight * entropy_of_log_odds(storage.log_odds(stored)))

        def measure(stored: Array) -> Array:
            return _to_fixed_point(entropy_of_log_odds(storage.log_odds(stored)))

    else:
        length = table.shape[0] // 4

        def find_size(stored: Array) -> Array:
            return jnp.minimum(jnp.abs(storage.value(stored).astype(jnp.int32)), jnp.int32(storage.limit))

        def weigh(weighted_as: Array, stored: Array) -> Array:
            above, below = storage.above(weighted_as, KNOWN), storage.below(weighted_as, 1.0 - KNOWN)
            row = jnp.where(above, jnp.int32(0), jnp.where(below, jnp.int32(length), jnp.int32(2 * length)))
            return table[row + find_size(stored)]

        def measure(stored: Array) -> Array:
            return table[3 * length + find_size(stored)]

    weighted_old = weigh(old, old)
    changes = (
        weigh(new, new) - weighted_old,
        jnp.where(interest, measure(new) - measure(old), jnp.int32(0)),
        weigh(new, old) - weighted_old,
    )
    increment = jnp.where(interest, jnp.int32(257), jnp.int32(1))  # 8 bits for each count
    predicted = storage.above(new, PREDICTED).astype(jnp.int32) - storage.above(old, PREDICTED).astype(jnp.int32)
    seen = (new != storage.unseen).astype(jnp.int32) - (old != storage.unseen).astype(jnp.int32)
    counts = predicted * increment + ((seen * increment) << 16)
    sums = (cells + change for cells, change in zip(added, (*changes, counts), strict=True))
    return tuple(sums)


def _write_changes(out: Any, added: Any) -> None:
    """Write the sums of a strip: (high, low) of each fixed-point number, see `fixed_point.total`, then the counts."""
    *fractions, counts = added
    for k, cells in enumerate(fractions):
        for part, values in enumerate((cells >> 12, cells & 4095)):
            out[2 * k + part] = jnp.sum(values, dtype=jnp.int32)
    for k in range(_COUNTS):
        count = ((counts + 128) & 255) - 128  # a cell's count changes at most once in each of `_MOST_TILES` tiles
        out[2 * _PAIRS + k] = jnp.sum(count, dtype=jnp.int32)
        counts = (counts - count) >> 8


def _to_fixed_point(values: Array) -> Array:
    """`fixed_point.to_fixed_point` of values in [0, 1] (Triton has no rounding to even)."""
    scaled = values * jnp.float32(2**FRACTION_BITS)
    below = jnp.floor(scaled)
    whole = below.astype(jnp.int32)
    rest = scaled - below
    return whole + ((rest > 0.5) | ((rest == 0.5) & (whole & 1 == 1))).astype(jnp.int32)


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
    bits = _ground_bits(terrain)
    sums = _on_platform(functools.partial(_look, config), words, *(() if bits is None else (bits,)))
    unit = jnp.take(jnp.asarray(units), level, mode="clip")
    return sums[..., :LATTICE, :LATTICE] * unit[..., None, None]


def _look(config: MapConfig, words: Array, *bits: Array, interpret: bool) -> Array:
    """float32[B, A, 16, 16]: resized readings in the units of `_look_matrices`."""
    matrices, _, exact = _look_matrices(config.cells_per_footprint)
    copies = words.shape[0]
    agents = config.num_agents
    shared = any(len(one) == 1 for one in bits)
    return pl.pallas_call(
        functools.partial(_look_at, config, exact),
        grid=(agents, copies),
        in_specs=[
            pl.BlockSpec((None, words.shape[1]), lambda a, b: (b, 0)),
            pl.BlockSpec(matrices.shape, lambda a, b: (0, 0, 0)),
            *(pl.BlockSpec((None, *one.shape[1:]), lambda a, b: (_by_copy(shared, b), 0, 0)) for one in bits),
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
