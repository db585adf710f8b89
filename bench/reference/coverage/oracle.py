"""An independent NumPy implementation of the multi-UAV mapping environment, one mission at a time.

A team of UAVs flies over a 50 m x 50 m area with a binary ground truth. Each keeps a probability map of class 1,
measures the ground below it with an accuracy that falls with altitude, and exchanges its latest measurement with the
teammates in range. The task is that of Westheider, Rueckin and Popovic, "Multi-UAV Adaptive Path Planning Using Deep
Reinforcement Learning" (IROS 2023, arXiv 2303.01150) and of its public code `dmar-bonn/ipp-marl`, whose rules are
restated here in words and formulas and reimplemented.

This module is written for clarity and as a fair baseline for speed: footprints are slices, maps are resized by two
small matrix products, beliefs are probabilities in float64. It serves as the oracle of the tests of the JAX environment
and as the one-mission-at-a-time system that the JAX environment is compared with.

Conventions: axis 0 of every map is x and axis 1 is y. N agents, T = budget + 1 steps, n map side in cells, A actions.
Positions are integer metres [x, y, z]. Measurement k = 0 is taken at the start, measurement k = t + 1 after step t.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

AREA = 50  # metres along each side
SPACING = 5  # metres between neighbouring lattice points, horizontally and vertically
LATTICE = 11  # lattice points along each side; also the side of every observation
ALTITUDES = (5, 10, 15)
ERROR_RATES = (0.01, 0.265, 0.375)  # probability of a wrong reading at each altitude
P_MIN = 0.0001
P_MAX = 0.9999
TIE_MARGIN = 1e-4  # a cell counts as predicted class 1 above 0.5 + this
TERRAINS = ("split", "corner", "band", "diagonal", "four", "field")
STARTS = ("uniform", "corners")
CORNERS = ((10, 10), (40, 10), (40, 40), (10, 40))
RANDOM_RANGES = (0.0, 15.0, 25.0, 100.0)

Integers = Sequence[int] | np.ndarray
Box = tuple[int, int, int, int]  # row from, row to, column from, column to; upper bounds exclusive
Readings = Callable[[int, int, Box], np.ndarray]  # (k, agent, clipped footprint) -> bool array, True = "occupied"


@dataclass(frozen=True)
class Settings:
    """Settings of a mission; the defaults come from the published experiments."""

    num_agents: int = 4  # team size N
    budget: int = 14  # number of decisions less one; a mission has T = budget + 1 steps
    # pixels along the edge of a footprint at 5 m; sets the resolution of the map (57 gives 493 x 493 cells)
    q: int = 57
    num_actions: int = 6  # 6 (up, four sides, down), 4 (four sides) or 27 (every neighbour of the 3-D lattice)
    communication_range: float = 25.0  # metres, altitude included
    failure_rate: float = 0.0  # probability that a message within range is lost
    delay: int = 0  # steps after which a message arrives, with the position and the measurement of when it was sent
    fix_range: bool = True  # if False the range is drawn once per mission from 0, 15, 25 and 100 m
    prior: float = 0.5  # initial probability of class 1
    class_weights: tuple[float, float] = (0.0, 1.0)  # weight in the entropy of cells believed to be class 0 and class 1
    unknown_weight: float = 0.5  # weight of undecided cells
    # reward_scale, reward_offset: r = scale * relative utility + offset
    reward_scale: float = 22.0
    reward_offset: float = -0.5
    # "split", "corner", "band", "diagonal", "four", "field", or "mixed" for one of them per mission
    terrain: str = "split"
    start: str = "uniform"  # "uniform" (independent lattice points) or "corners"; always at the highest altitude

    def __post_init__(self) -> None:
        if self.num_actions not in MOVES:
            raise ValueError(f"num_actions is {self.num_actions}; use one of {sorted(MOVES)}.")
        if self.terrain not in (*TERRAINS, "mixed"):
            raise ValueError(f"unknown terrain {self.terrain!r}; use one of {(*TERRAINS, 'mixed')}.")
        if self.start not in STARTS:
            raise ValueError(f"unknown start {self.start!r}; use one of {STARTS}, or inject the start positions.")

    @property
    def steps(self) -> int:
        """T, the number of decisions of a mission."""
        return self.budget + 1


# ---------------------------------------------------------------- geometry


def cells_per_metre(q: int) -> float:
    """Cells per metre: the 60 degree camera's footprint at 5 m is 10 tan(30 deg) metres wide and holds q cells."""
    return q * math.sqrt(3.0) / 10.0


def map_side(q: int) -> int:
    """Side n of the map in whole cells."""
    return math.floor(AREA * cells_per_metre(q))


def radius(altitude: int, q: int) -> int:
    """Half the side of an unclipped footprint, in cells: floor(q z / 10)."""
    return q * int(altitude) // 10


def footprint_full(position: Integers, q: int) -> Box:
    """Unclipped footprint: 2 r cells a side from the cell under the agent less r; may reach over the map's border."""
    x, y, z = position
    r = radius(z, q)
    row, col = (math.floor(int(v) * cells_per_metre(q)) for v in (x, y))
    return row - r, row + r, col - r, col + r


def footprint(position: Integers, q: int) -> Box:
    """Clipped footprint, the cells that are measured.

    All four bounds are clipped to [0, n - 1] while the upper ones stay exclusive, so the last row and the last column
    of the map are never observed.
    """
    last = map_side(q) - 1
    r0, r1, c0, c1 = (min(max(bound, 0), last) for bound in footprint_full(position, q))
    return r0, r1, c0, c1


def lattice_index(positions: np.ndarray) -> np.ndarray:
    """Metres [..., 3] to lattice indices [..., 3]: x and y from 0 to 10, altitude from 0 to 2."""
    return np.asarray(positions) // SPACING - np.array([0, 0, 1])


# ---------------------------------------------------------------- terrain


def _first(n: int, percent: int) -> slice:
    return slice(0, n * percent // 100)


def _last(n: int, percent: int) -> slice:
    return slice(n - n * (percent - 1) // 100, n)


def _fill(n: int, *blocks: tuple[slice, slice]) -> np.ndarray:
    truth = np.zeros((n, n), dtype=bool)
    for block in blocks:
        truth[block] = True
    return truth


def split_terrain(n: int, side: int, percent: int) -> np.ndarray:
    """Half-plane: the first rows (side 0), last rows (1), first columns (2) or last columns (3); [n, n] bool.

    A "first" strip holds percent, a "last" one percent - 1 hundredths of the map, rounded down to cells.
    """
    part = _last(n, percent) if side % 2 else _first(n, percent)
    return _fill(n, (part, slice(None)) if side < 2 else (slice(None), part))


def corner_terrain(n: int, side: int, row_percent: int, col_percent: int) -> np.ndarray:
    """One rectangle in a corner: (first rows, first columns), (last, first), (last, last), (first, last)."""
    rows = _last(n, row_percent) if side in (1, 2) else _first(n, row_percent)
    cols = _last(n, col_percent) if side in (2, 3) else _first(n, col_percent)
    return _fill(n, (rows, cols))


def band_terrain(n: int, side: int, low: int, high: int) -> np.ndarray:
    """A band of rows (side 0) or columns (2) between two percentages, or its complement (1 and 3)."""
    part = slice(n * low // 100, n * high // 100)
    band = _fill(n, (part, slice(None)) if side < 2 else (slice(None), part))
    return ~band if side % 2 else band


def diagonal_terrain(n: int, side: int, percent: int) -> np.ndarray:
    """Squares in two opposite corners: the first and the last corner for an even side, the other two for an odd one."""
    first, last = _first(n, percent), _last(n, percent)
    if side % 2:
        return _fill(n, (first, last), (last, first))
    return _fill(n, (first, first), (last, last))


def four_terrain(n: int, side: int, percent: int) -> np.ndarray:
    """Squares in all four corners: class 1 for an even side; class 0, on class 1, for an odd one."""
    parts = (_first(n, percent), _last(n, percent))
    squares = _fill(n, *((rows, cols) for rows in parts for cols in parts))
    return ~squares if side % 2 else squares


def field_terrain(noise: np.ndarray) -> np.ndarray:
    """Gaussian random field from white noise [n, n]: power falls as the frequency to the power -5; upper half is 1."""
    n = len(noise)
    frequency = np.fft.fftfreq(n) * n
    length = np.hypot(frequency[:, None], frequency[None, :])
    length[0, 0] = 1.0
    amplitude = length**-2.5
    amplitude[0, 0] = 0.0
    field = np.fft.ifft2(np.fft.fft2(noise) * amplitude).real
    return field >= 0.5 * (field.min() + field.max())


def draw_terrain(rng: np.random.Generator, n: int, family: str) -> np.ndarray:
    """Draw a terrain [n, n] bool of the named family ("mixed": the family is drawn too)."""
    if family == "mixed":
        family = TERRAINS[rng.integers(len(TERRAINS))]
    if family == "field":
        return field_terrain(rng.standard_normal((n, n)))
    side = int(rng.integers(4))
    if family == "split":
        return split_terrain(n, side, int(rng.integers(30, 61)))
    if family == "corner":
        return corner_terrain(n, side, int(rng.integers(55, 75)), int(rng.integers(55, 75)))
    if family == "band":
        return band_terrain(n, side, int(rng.integers(20, 35)), int(rng.integers(65, 80)))
    if family == "diagonal":
        return diagonal_terrain(n, side, int(rng.integers(40, 55)))
    low = 32 if side % 2 else 28
    return four_terrain(n, side, int(rng.integers(low, low + 10)))


def draw_start(rng: np.random.Generator, num_agents: int, kind: str) -> np.ndarray:
    """Start positions [N, 3] in metres at 15 m: independent lattice points, or the four corners in turn."""
    start = np.full((num_agents, 3), ALTITUDES[-1])
    if kind == "corners":
        start[:, :2] = [CORNERS[i % len(CORNERS)] for i in range(num_agents)]
    else:
        start[:, :2] = rng.integers(0, LATTICE, (num_agents, 2)) * SPACING
    return start


# ---------------------------------------------------------------- actions and masks

_LATERAL = ((-1, 0), (0, -1), (0, 1), (1, 0))  # lattice offsets (x, y) of the four sides, in order of action
_MOVES_4 = [(dx, dy, 0) for dx, dy in _LATERAL]
_MOVES_27 = [(dx, dy, dz) for dz in (1, 0, -1) for dx in (-1, 0, 1) for dy in (-1, 0, 1)]
MOVES: dict[int, np.ndarray] = {  # number of actions -> displacement [A, 3] in metres
    4: SPACING * np.array(_MOVES_4),
    6: SPACING * np.array([(0, 0, 1), *_MOVES_4, (0, 0, -1)]),
    27: SPACING * np.array(_MOVES_27),
}
_HOVER = 13  # of the 27


def move(position: np.ndarray, action: int, num_actions: int) -> np.ndarray:
    """Position [3] in metres after an action."""
    return np.asarray(position) + MOVES[num_actions][action]


def boundary_mask(position: np.ndarray, num_actions: int = 6) -> np.ndarray:
    """[A] bool: actions that stay within [0, 50] x [0, 50] x [5, 15]; hovering, one of the 27, is never allowed."""
    target = np.asarray(position) + MOVES[num_actions]
    low, high = (0, 0, ALTITUDES[0]), (AREA, AREA, ALTITUDES[-1])
    mask = np.all((target >= low) & (target <= high), axis=1)
    if num_actions == 27:
        mask[_HOVER] = False
    return mask


def collision_mask(mask: np.ndarray, position: np.ndarray, others: np.ndarray) -> np.ndarray:
    """[A] bool: `mask` without the moves towards agents that have already moved.

    With d the lattice offset from the own position to each earlier agent's new position, taken in order:

    * 6 actions: altitude is ignored. An agent in the same column closes up and down, an agent on a neighbouring column
      closes that side; either only while more than one action is still open.
    * 4 actions: an agent on a neighbouring column closes that side.
    * 27 actions: an agent on one of the eight neighbouring columns, at most one level away, closes that offset on all
      three levels; an agent right above or below closes straight up and straight down.

    The result can be empty; see `Mission.action_mask`.

    Args:
        mask: [A] bool, usually the boundary mask.
        position: [3] own position in metres, before the move.
        others: [M, 3] new positions of the earlier agents, in order.
    """
    rule = {4: _close_4, 6: _close_6, 27: _close_27}[len(mask)]
    mask = np.array(mask, dtype=bool)
    for other in np.asarray(others).reshape(-1, 3):
        rule(mask, *(int(d) // SPACING for d in other - np.asarray(position)))
    return mask


def _close_4(mask: np.ndarray, dx: int, dy: int, dz: int) -> None:
    if (dx, dy) in _LATERAL:
        mask[_LATERAL.index((dx, dy))] = False


def _close_6(mask: np.ndarray, dx: int, dy: int, dz: int) -> None:
    if mask.sum() <= 1:
        return
    if (dx, dy) == (0, 0):
        mask[[0, 5]] = False
    elif (dx, dy) in _LATERAL:
        mask[1 + _LATERAL.index((dx, dy))] = False


def _close_27(mask: np.ndarray, dx: int, dy: int, dz: int) -> None:
    if abs(dz) > 1 or max(abs(dx), abs(dy)) > 1:
        return
    middle = 3 * (dx + 1) + dy + 1  # of the upper layer
    if (dx, dy) != (0, 0):
        mask[[middle, middle + 9, middle + 18]] = False
    elif dz != 0:
        mask[[4, 22]] = False


# ---------------------------------------------------------------- sensor, belief, communication


def error_rate(altitude: int) -> float:
    """Probability of a wrong reading; defined at 5, 10 and 15 m only."""
    return ERROR_RATES[ALTITUDES.index(int(altitude))]


def draw_readings(rng: np.random.Generator, truth: np.ndarray, box: Box, altitude: int) -> np.ndarray:
    """Independent readings of every cell of a clipped footprint, bool: the truth, flipped with the error rate."""
    r0, r1, c0, c1 = box
    true = truth[r0:r1, c0:c1]
    return true ^ (rng.random(true.shape) < error_rate(altitude))


def bayes(p: np.ndarray, reading: np.ndarray | bool, altitude: int, prior: float = 0.5) -> np.ndarray:
    """Posterior of class 1 given readings at an altitude.

    The belief is clipped to [0.0001, 0.9999] before (never after) the update. The posterior odds are
    the odds of the belief times the odds of the reading (accuracy : error, inverted for a "free" reading), divided by
    the prior odds.
    """
    p = np.clip(p, P_MIN, P_MAX)
    error = error_rate(altitude)
    factor = np.where(reading, (1.0 - error) / error, error / (1.0 - error)) * ((1.0 - prior) / prior)
    odds = p / (1.0 - p) * factor
    return odds / (1.0 + odds)


@dataclass(frozen=True)
class Measurement:
    """Measurement and message of an agent: position, clipped footprint, readings (bool, True = "occupied")."""

    position: np.ndarray
    box: Box
    reading: np.ndarray

    @property
    def altitude(self) -> int:
        return int(self.position[2])

    def image(self, q: int) -> np.ndarray:
        """The measurement as probabilities on the unclipped footprint [2 r, 2 r]: 1 - e, e, or 0.5 outside."""
        f0, f1, g0, g1 = footprint_full(self.position, q)
        r0, r1, c0, c1 = self.box
        image = np.full((f1 - f0, g1 - g0), 0.5)
        error = error_rate(self.altitude)
        image[r0 - f0 : r1 - f0, c0 - g0 : c1 - g0] = np.where(self.reading, 1.0 - error, error)
        return image


def update_own(belief: np.ndarray, measurement: Measurement, prior: float = 0.5) -> None:
    """Enter the agent's own measurement in place. Only the cells of its clipped footprint are clipped and updated."""
    r0, r1, c0, c1 = measurement.box
    footprint = belief[r0:r1, c0:c1]
    footprint[:] = bayes(footprint, measurement.reading, measurement.altitude, prior)


def fuse(belief: np.ndarray, measurement: Measurement, prior: float = 0.5) -> None:
    """Fuse a message in place. The whole map is clipped, then the cells of the sender's footprint are updated."""
    np.clip(belief, P_MIN, P_MAX, out=belief)
    update_own(belief, measurement, prior)


def received_messages(positions: np.ndarray, comm_range: float, draws: np.ndarray, failure_rate: float) -> np.ndarray:
    """[N, N] bool, [i, j]: i receives j's message.

    Agents in the same place always do. Others do within the range (3-D distance, inclusive) if the pair's own uniform
    draw is at least the failure rate; the two directions of a link fail independently.

    Args:
        positions: [N, 3] metres.
        comm_range: metres.
        draws: [N, N] uniform in [0, 1).
        failure_rate: probability that a message is lost.
    """
    offset = positions[:, None, :] - positions[None, :, :]
    distance = np.sqrt((offset.astype(np.float64) ** 2).sum(-1))
    return (distance < 0.001) | ((distance <= comm_range) & (draws >= failure_rate))


# ---------------------------------------------------------------- entropy, reward, metrics


def entropy(p: np.ndarray) -> np.ndarray:
    """Binary entropy in bits, of p clipped to [0.0001, 0.9999]; few buffers, as memory limits large maps."""
    p = np.clip(p, P_MIN, P_MAX)
    h = np.log2(p)
    h *= p
    np.subtract(1.0, p, out=p)
    other = np.log2(p)
    other *= p
    h += other
    return np.negative(h, out=h)


def class_weight(
    p: np.ndarray, class_weights: tuple[float, float] = (0.0, 1.0), unknown_weight: float = 0.5
) -> np.ndarray:
    """Weight of a cell: the weight of class 1 above 0.501, of class 0 below 0.499, the unknown weight between."""
    weight = np.full_like(p, unknown_weight)
    np.copyto(weight, class_weights[0], where=p < 0.499)
    np.copyto(weight, class_weights[1], where=p > 0.501)
    return weight


def utilities(before: np.ndarray, after: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    """Relative and absolute utility of a change of the global map.

    Both weight the reduction of entropy by the class weights of the map after the change; the relative one is divided
    by the entropy before, weighted in the same way (0 if that is 0), the absolute one by the number of cells.

    Args:
        before, after: [n, n] entropies.
        weight: [n, n] class weights of the map after.
    """
    gain = float(np.vdot(weight, before - after))
    scale = float(np.vdot(weight, before))
    return (gain / scale if scale > 0.0 else 0.0), gain / weight.size


def reward(before: np.ndarray, after: np.ndarray, settings: Settings) -> float:
    """Team reward for a change of the global map of probabilities [n, n]: scale * relative utility + offset."""
    return _reward(entropy(before), entropy(after), after, settings)


def _reward(h_before: np.ndarray, h_after: np.ndarray, after: np.ndarray, settings: Settings) -> float:
    weight = class_weight(after, settings.class_weights, settings.unknown_weight)
    return settings.reward_scale * utilities(h_before, h_after, weight)[0] + settings.reward_offset


def map_entropy(belief: np.ndarray, truth: np.ndarray) -> float:
    """Mean entropy over the cells whose true class is 1 (0 if there is none); 1 for a prior of 0.5."""
    return float(entropy(belief[truth]).mean()) if truth.any() else 0.0


def f1_score(belief: np.ndarray, truth: np.ndarray, margin: float = TIE_MARGIN) -> float:
    """F1 of class 1, predicted where p > 0.5 + margin; 0 without a true positive.

    The margin makes cells with contradicting readings count as undecided whatever their rounding. With margin 0
    rounding decides them, as in the published figures.
    """
    predicted = belief > 0.5 + margin
    hits = int((predicted & truth).sum())
    return 2.0 * hits / (int(predicted.sum()) + int(truth.sum())) if hits else 0.0


# ---------------------------------------------------------------- resizing to 11 x 11


@functools.lru_cache(maxsize=64)
def area_matrix(n: int) -> np.ndarray:
    """[11, n] float64: resizing of one axis from n to 11 cells as the usual area interpolation does it.

    Shrinking averages, output cell d covering [d s, (d + 1) s) with s = n / 11; fractions of a cell below 0.001 are
    left out. Enlarging (n < 11) is linear. A map X becomes A X A^T.
    """
    matrix = np.zeros((LATTICE, n))
    row = _shrinking_row if n >= LATTICE else _enlarging_row
    for d in range(LATTICE):
        for column, weight in row(d, n):
            matrix[d, column] += weight
    matrix.flags.writeable = False
    return matrix


def _shrinking_row(d: int, n: int) -> list[tuple[int, float]]:
    s = n / LATTICE
    low, high = d * s, (d + 1) * s
    width = min(s, n - low)
    last = min(math.floor(high), n - 1)
    first = min(math.ceil(low), last)
    row = [(column, 1.0 / width) for column in range(first, last)]
    if first - low > 1e-3:
        row.append((first - 1, (first - low) / width))
    if high - last > 1e-3:
        row.append((last, min(high - last, 1.0, width) / width))
    return row


def _enlarging_row(d: int, n: int) -> list[tuple[int, float]]:
    s = n / LATTICE
    x = math.floor(d * s)
    f = (d + 1) - (x + 1) / s
    f = 0.0 if f <= 0.0 else f - math.floor(f)
    if x >= n - 1:
        return [(n - 1, 1.0)]
    return [(x, 1.0 - f), (x + 1, f)]


def resize(image: np.ndarray) -> np.ndarray:
    """Square map [m, m] to [11, 11]."""
    matrix = area_matrix(len(image))
    return matrix @ image @ matrix.T


# ---------------------------------------------------------------- observation and critic state


def position_channel(position: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
    """[11, 11]: the surroundings of an agent, itself at (5, 5).

    1 for lattice points inside the area, 0 outside; the own cell and then those of the received agents that lie within
    the window hold (altitude index + 1) / 4. An agent in the same column overwrites the own mark.
    """
    centre = LATTICE // 2
    gx, gy, gz = lattice_index(position)
    offsets = np.arange(LATTICE) - centre
    inside_x = (gx + offsets >= 0) & (gx + offsets < LATTICE)
    inside_y = (gy + offsets >= 0) & (gy + offsets < LATTICE)
    channel = np.outer(inside_x, inside_y).astype(np.float64)
    channel[centre, centre] = (gz + 1) / 4
    for other in others:
        hx, hy, hz = lattice_index(other)
        a, b = hx - gx + centre, hy - gy + centre
        if 0 <= a < LATTICE and 0 <= b < LATTICE:
            channel[a, b] = (hz + 1) / 4
    return channel


def footprint_channel(n: int, own_box: Box | None, other_boxes: Sequence[Box], mark: float) -> np.ndarray:
    """[11, 11]: 0.5, with `mark` in the footprints of the others and then 1 in the own one, resized from n x n."""
    image = np.full((n, n), 0.5)
    for r0, r1, c0, c1 in other_boxes:
        image[r0:r1, c0:c1] = mark
    if own_box is not None:
        r0, r1, c0, c1 = own_box
        image[r0:r1, c0:c1] = 1.0
    return resize(image)


def global_position_channel(positions: np.ndarray) -> np.ndarray:
    """[11, 11]: 0, with (altitude index + 1) / 3 at the agents' lattice points, later agents over earlier ones."""
    channel = np.zeros((LATTICE, LATTICE))
    for gx, gy, gz in lattice_index(positions):
        channel[gx, gy] = (gz + 1) / 3
    return channel


def other_actions_channel(agent: int, positions: np.ndarray, actions: Integers, num_actions: int) -> np.ndarray:
    """[11, 11]: 0, with (action + 1) / A at the lattice points of the other agents, in order."""
    channel = np.zeros((LATTICE, LATTICE))
    for j, (gx, gy, _) in enumerate(lattice_index(positions)):
        if j != agent:
            channel[gx, gy] = (actions[j] + 1) / num_actions
    return channel


# ---------------------------------------------------------------- one mission


class Mission:
    """One mission, stepped decision by decision.

    Everything random comes from `rng`, or is injected, so that recorded missions can be replayed:

        mission = Mission(Settings(q=7), np.random.default_rng(0))
        while not mission.done:
            obs = mission.observe()
            actions = mission.random_actions()
            state = mission.critic_state(actions)
            reward, done = mission.step(actions)

    Args:
        settings: see `Settings`.
        rng: source of everything that is not injected; may be left out if all of it is.
        truth: [n, n] bool ground truth.
        start: [N, 3] start positions in metres.
        readings: callable (k, agent, clipped footprint) -> bool array over that footprint, True = "occupied".
        comm: [T, N, N] bool, [t, i, j]: i receives what j sends at step t (`delay` steps later). A row T may follow;
            without it, messages after the last step follow the range rule without failures.
        keep_measured: also keep the local beliefs as they were before the messages.

    Attributes:
        t: number of steps made; the mission is over at t = T.
        positions: [N, 3] int metres.
        measurements: the latest measurement of each agent.
        messages: the measurements in the messages that arrive in the present step, one of each agent.
        received: [N, N] bool, who receives them.
        local_beliefs: [N, n, n] float64, after fusing the messages of the present step.
        measured_beliefs: [N, n, n] float64 or None: the same before fusing (kept only with `keep_measured`).
        global_belief: [n, n] float64, all measurements of the team.
        previous_global_belief: [n, n] float64, the global belief of the previous step (before the first: the prior).
        seen: [n, n] bool, cells measured at least once by anyone.
    """

    def __init__(
        self,
        settings: Settings,
        rng: np.random.Generator | None = None,
        *,
        truth: np.ndarray | None = None,
        start: np.ndarray | None = None,
        readings: Readings | None = None,
        comm: np.ndarray | None = None,
        keep_measured: bool = False,
    ):
        self.settings = settings
        self.n = map_side(settings.q)
        self._rng = rng
        self._comm = comm
        self._keep_measured = keep_measured
        self.truth = draw_terrain(self.rng, self.n, settings.terrain) if truth is None else np.asarray(truth, bool)
        if self.truth.shape != (self.n, self.n):
            raise ValueError(f"truth has shape {self.truth.shape}; q = {settings.q} needs {(self.n, self.n)}.")
        start = draw_start(self.rng, settings.num_agents, settings.start) if start is None else start
        self.positions = np.array(start, dtype=np.int64)
        if self.positions.shape != (settings.num_agents, 3):
            raise ValueError(f"start has shape {self.positions.shape}; expected {(settings.num_agents, 3)}.")
        self._readings = self._draw_reading if readings is None else readings
        self.range = settings.communication_range
        if not settings.fix_range and comm is None:
            self.range = RANDOM_RANGES[self.rng.integers(len(RANDOM_RANGES))]
        self.t = 0
        self._sent: list[tuple[list[Measurement], np.ndarray]] = []  # of every step so far
        self.seen = np.zeros((self.n, self.n), dtype=bool)
        self.local_beliefs = np.full((settings.num_agents, self.n, self.n), float(settings.prior))
        self.global_belief = np.full((self.n, self.n), float(settings.prior))
        self.measured_beliefs: np.ndarray | None = None
        self._measure_and_share()
        self._global_entropy = entropy(self.global_belief)

    @property
    def rng(self) -> np.random.Generator:
        """Return the given generator; raise an error if something has to be drawn without one."""
        if self._rng is None:
            raise ValueError("the mission has to draw something: give it a generator, or inject what is missing.")
        return self._rng

    @property
    def done(self) -> bool:
        return self.t == self.settings.steps

    # ---- dynamics

    def step(self, actions: Integers) -> tuple[float, bool]:
        """Move all agents, measure, exchange messages.

        Returns:
            The reward for the change of the global map that these actions cause (the measurements taken after the
            moves), and whether the mission is over. The original system pays it one step later.
        """
        if self.done:
            raise ValueError(f"the mission is over: it has {self.settings.steps} steps.")
        self.positions = self.positions + MOVES[self.settings.num_actions][np.asarray(actions)]
        self.t += 1
        self._measure_and_share()
        h_before = self._global_entropy
        self._global_entropy = entropy(self.global_belief)
        return _reward(h_before, self._global_entropy, self.global_belief, self.settings), self.done

    def _measure_and_share(self) -> None:
        """Measurement k = t of every agent, own updates, messages of step t, global fusion."""
        prior = self.settings.prior
        self.measurements = [self._measure(i) for i in range(self.settings.num_agents)]
        for belief, measurement in zip(self.local_beliefs, self.measurements, strict=True):
            update_own(belief, measurement, prior)
        if self._keep_measured:
            self.measured_beliefs = self.local_beliefs.copy()
        self._sent.append((self.measurements, self._messages()))
        self.messages, self.received = self._sent[max(self.t - self.settings.delay, 0)]
        if self.t < self.settings.delay:
            self.received = np.zeros_like(self.received)
        for i, belief in enumerate(self.local_beliefs):
            for j in self._heard(i):
                fuse(belief, self.messages[j], prior)
        self.previous_global_belief = self.global_belief
        self.global_belief = self.global_belief.copy()
        for measurement in self.measurements:
            fuse(self.global_belief, measurement, prior)

    def _measure(self, agent: int) -> Measurement:
        position = self.positions[agent].copy()
        box = footprint(position, self.settings.q)
        r0, r1, c0, c1 = box
        self.seen[r0:r1, c0:c1] = True
        return Measurement(position, box, self._readings(self.t, agent, box))

    def _draw_reading(self, k: int, agent: int, box: Box) -> np.ndarray:
        return draw_readings(self.rng, self.truth, box, int(self.positions[agent, 2]))

    def _messages(self) -> np.ndarray:
        n_agents = self.settings.num_agents
        if self._comm is not None and self.t < len(self._comm):
            return np.asarray(self._comm[self.t], dtype=bool)
        failing = self.settings.failure_rate > 0.0 and self._comm is None
        draws = self.rng.random((n_agents, n_agents)) if failing else np.ones((n_agents, n_agents))
        return received_messages(self.positions, self.range, draws, self.settings.failure_rate if failing else 0.0)

    def _heard(self, agent: int) -> list[int]:
        """Return the other agents whose message the agent received, in increasing order."""
        return [int(j) for j in np.flatnonzero(self.received[agent]) if j != agent]

    # ---- acting

    def action_mask(self, agent: int, moved: Sequence[np.ndarray] = ()) -> np.ndarray:
        """[A] bool for an agent, given the new positions of the agents before it; the boundary mask if none is left."""
        position = self.positions[agent]
        boundary = boundary_mask(position, self.settings.num_actions)
        mask = collision_mask(boundary, position, np.array(moved, dtype=np.int64))
        return mask if mask.any() else boundary

    def act(self, choose: Callable[[int, np.ndarray], int]) -> tuple[np.ndarray, np.ndarray]:
        """Let the agents choose in order, each knowing the earlier ones' moves.

        Args:
            choose: callable (agent, mask [A] bool) -> action.

        Returns:
            actions [N] int64 and masks [N, A] bool. The agents are not moved; give the actions to `step`.
        """
        moved: list[np.ndarray] = []
        actions = []
        masks = []
        for agent in range(self.settings.num_agents):
            mask = self.action_mask(agent, moved)
            action = int(choose(agent, mask))
            moved.append(move(self.positions[agent], action, self.settings.num_actions))
            actions.append(action)
            masks.append(mask)
        return np.array(actions), np.array(masks)

    def random_actions(self) -> np.ndarray:
        """[N] int64: uniform over the mask of each agent, in order."""
        return self.act(lambda agent, mask: int(self.rng.choice(np.flatnonzero(mask))))[0]

    # ---- observations

    def observe(self) -> np.ndarray:
        """Actor observations [N, 11, 11, 7] float32.

        Channels: 0 share of the budget left; 1 agent number; 2 positions around the agent; 3 weighted entropy of the
        local belief; 4 weighted entropy of the agent's own last measurement; 5 local belief; 6 footprints of the agents
        heard. Probabilities are resized first; weights and entropies are computed from the result.
        """
        return np.stack([self._observe(i) for i in range(self.settings.num_agents)]).astype(np.float32)

    def _observe(self, agent: int) -> np.ndarray:
        obs = np.empty((LATTICE, LATTICE, 7))
        heard = self._heard(agent)
        measurement = self.measurements[agent]
        others = [self.messages[j] for j in heard]
        belief = resize(self.local_beliefs[agent])
        obs[..., 0] = (self.settings.budget - self.t) / self.settings.budget
        obs[..., 1] = (agent + 1) / self.settings.num_agents
        obs[..., 2] = position_channel(measurement.position, [other.position for other in others])
        obs[..., 3] = self._weighted_entropy(belief)
        obs[..., 4] = self._weighted_entropy(resize(measurement.image(self.settings.q)))
        obs[..., 5] = np.clip(belief, P_MIN, P_MAX)
        obs[..., 6] = footprint_channel(self.n, measurement.box, [other.box for other in others], mark=0.0)
        return obs

    def critic_state(self, actions: Integers, obs: np.ndarray | None = None) -> np.ndarray:
        """Critic states [N, 11, 11, 12] float32 for the actions about to be made.

        Channels 0-6 are the actor observation (pass it as `obs` if it is at hand); then 7 positions of the team, 8
        weighted entropy and 9 probability of the global belief, 10 footprints of the team, 11 actions of the others.
        """
        num_agents = self.settings.num_agents
        state = np.empty((num_agents, LATTICE, LATTICE, 12), dtype=np.float32)
        state[..., :7] = self.observe() if obs is None else obs
        belief = resize(self.global_belief)
        state[..., 7] = global_position_channel(self.positions)
        state[..., 8] = self._weighted_entropy(belief)
        state[..., 9] = np.clip(belief, P_MIN, P_MAX)
        state[..., 10] = footprint_channel(self.n, None, [m.box for m in self.measurements], mark=1.0)
        for i in range(num_agents):
            state[i, ..., 11] = other_actions_channel(i, self.positions, actions, self.settings.num_actions)
        return state

    def _weighted_entropy(self, p: np.ndarray) -> np.ndarray:
        return class_weight(p, self.settings.class_weights, self.settings.unknown_weight) * entropy(p)

    # ---- metrics

    def metrics(self, belief: np.ndarray | None = None, seen: np.ndarray | None = None) -> dict[str, float]:
        """Metrics of the global belief, which holds t + 1 measurements of every agent, or of another map [n, n].

        entropy: mean over true class-1 cells; f1: with the tie rule; f1_strict: with p > 0.5; coverage and
        roi_coverage: share of all cells, and of class-1 cells, observed at least once.
        """
        belief = self.global_belief if belief is None else belief
        seen = self.seen if seen is None else seen
        return {
            "entropy": map_entropy(belief, self.truth),
            "f1": f1_score(belief, self.truth),
            "f1_strict": f1_score(belief, self.truth, margin=0.0),
            "coverage": float(seen.mean()),
            "roi_coverage": float(seen[self.truth].mean()) if self.truth.any() else 0.0,
        }


# ---------------------------------------------------------------- targets of the learner


def td_targets(reward: np.ndarray, done: np.ndarray, q: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """TD(lambda) targets of a row of transitions, [K] float64.

    y_t = r_t + gamma (1 - done_t) [(1 - lam) q_{t+1} + lam y_{t+1}]. A row that stops within a mission ends as if the
    value after it were 0.

    Args:
        reward, done: [K]; missions one after another, done = 1 at the last step of each.
        q: [K] value, by the target network, of the action taken in state t.
        gamma, lam: discount and lambda.
    """
    target = np.zeros(len(reward))
    following_q = following_y = 0.0
    for t in range(len(reward) - 1, -1, -1):
        target[t] = reward[t] + gamma * (1.0 - done[t]) * ((1.0 - lam) * following_q + lam * following_y)
        following_q = q[t]
        following_y = target[t]
    return target


def td_targets_original(
    reward: np.ndarray, done: np.ndarray, q: np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Targets and discounted returns as the original system computes them, [K] float64 each; for parity only.

    It departs from `td_targets` in three ways: the first step of every mission but the first gets 0; the bootstrap
    value is left out where it would fall on the last step of a mission or of the row, and is read from the next mission
    where it falls after it; the weights of the full return differ from TD(lambda)'s.
    """
    length = len(reward)
    target = np.zeros(length)
    returns = np.zeros(length)
    ends = np.flatnonzero(done)
    for t in range(length):
        if t > 0 and done[t - 1]:
            continue
        later = ends[ends >= t]
        end = int(later[0]) if len(later) else length - 1
        steps = end - t + 1
        partial = np.cumsum(gamma ** np.arange(steps) * reward[t : end + 1])  # G_1 .. G_M
        total = 0.0
        for m in range(1, steps + 1):
            open_end = t + m < length - 1 and not done[t + m]
            total += lam ** (m - 1) * (partial[m - 1] + (gamma**m * q[t + m] if open_end else 0.0))
        if end < length - 1:
            total += lam ** (steps + 1) * partial[-1]
        target[t], returns[t] = (1.0 - lam) * total, partial[-1]
    return target, returns
