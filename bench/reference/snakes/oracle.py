"""An independent implementation of the snakes game of the Jidi platform, one game at a time.

Snakes of two teams move on a torus, eat beans and die by running into a body; a dead snake starts again, with three
cells, where a fixed search finds room. The game, its observations and its rewards are those of the public repositories
`jidiai/Competition_3v3snakes` (engine, 26 values, original reward) and `zhizhengzhao/snake` (30 and 35 values, rewards
v1.1 and plus), whose rules, published defects included, are restated here and reimplemented.

A body is a list of cells: written for clarity, and as a fair baseline for speed. It
serves as the oracle of the tests of the JAX environment and as the one-game-at-a-time system that is compared with it.

Conventions: a cell is (row, column), rows counted downwards; directions and actions are 0 up, 1 down, 2 left, 3 right,
so that d ^ 1 is the opposite of d. n snakes, A controlled snakes of a team, B beans kept on the board.
"""

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

UP, DOWN, LEFT, RIGHT = range(4)
DIRECTIONS = (UP, DOWN, LEFT, RIGHT)
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
START_LENGTH = 3
PLACEMENTS = 10_000  # draws before a reset gives up
LAYOUTS = ("26", "30", "35")
REWARDS = ("original", "v1.1", "v1.1_fixed", "plus", "score")

Cell = tuple[int, int]
Integers = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Settings:
    """Settings of a game; the defaults come from the 3v3 competition."""

    # height, width: rows and columns of the board, at least 3 each
    height: int = 10
    width: int = 20
    num_snakes: int = 6  # n
    num_beans: int = 5  # B, the number of beans that a refill aims at
    max_step: int = 200  # steps of a game
    teams: int = 2  # 2 (the first and the second half of the snakes) or 1 (everyone for itself)
    fixed_respawn: bool = False  # respawned bodies are connected and never face their own neck; not the published game

    def __post_init__(self) -> None:
        if min(self.height, self.width) < 3:
            raise ValueError(f"the board is {self.height} x {self.width}; it needs three rows and three columns.")
        if self.teams not in (1, 2) or self.num_snakes < 1 or self.num_snakes % self.teams:
            raise ValueError(f"{self.num_snakes} snakes cannot form {self.teams} equal teams; use 1 or 2 teams.")

    @property
    def team_size(self) -> int:
        """A, the number of snakes of a team."""
        return self.num_snakes // self.teams

    def team(self, side: int) -> range:
        """Indices of the snakes of side 0 or 1."""
        if not 0 <= side < self.teams:
            raise ValueError(f"no side {side} in a game of {self.teams} team(s).")
        return range(side * self.team_size, (side + 1) * self.team_size)

    def cells(self) -> Iterator[Cell]:
        return itertools.product(range(self.height), range(self.width))

    def neighbour(self, cell: Cell, direction: int) -> Cell:
        """The cell one step away on the torus."""
        return (cell[0] + MOVES[direction][0]) % self.height, (cell[1] + MOVES[direction][1]) % self.width


CONFIGURATIONS = {
    "snakes_3v3": Settings(),
    "snakes_5p": Settings(num_snakes=5, teams=1),
    "snakes_1v1": Settings(height=6, width=8, num_snakes=2, max_step=50),
    "snakes_2p": Settings(height=6, width=8, num_snakes=2, max_step=50, teams=1),
}


@dataclass
class State:
    """State of the rules; functions return new states and do not change the given ones."""

    bodies: list[list[Cell]]  # the cells of each snake, head first; empty for a snake that could not respawn
    directions: list[int]  # the stored direction of each snake. It does not follow from the body: see `respawn`.
    beans: list[Cell]  # their cells, in an order that observations show
    step_count: int = 1  # 1 after a reset

    def occupied(self) -> set[Cell]:
        return {*self.beans, *itertools.chain.from_iterable(self.bodies)}


@dataclass
class Outcome:
    """Result of a step without its draws."""

    state: State  # after the step, with the remaining beans and no new ones
    rewards: list[int]  # change of each snake's game score
    hit: list[bool]  # whether each snake died
    done: bool  # whether the game is over
    fallen: dict[int, list[Cell]]  # the bodies of those that died, as the move left them


# ---------------------------------------------------------------- rules


def reset(settings: Settings, rng: np.random.Generator) -> State:
    """Straight snakes on uniformly drawn places, one after the other, then beans.

    A place is a tail cell and a direction; it is drawn again until its three cells are free.
    """
    state = State([], [], [])
    occupied: set[Cell] = set()
    for _ in range(settings.num_snakes):
        for _ in range(PLACEMENTS):
            direction = int(rng.integers(4))
            tail = int(rng.integers(settings.height)), int(rng.integers(settings.width))
            middle = settings.neighbour(tail, direction)
            body = [settings.neighbour(middle, direction), middle, tail]
            if occupied.isdisjoint(body):
                break
        else:
            raise ValueError(f"no room for {settings.num_snakes} snakes on {settings.height} x {settings.width} cells.")
        occupied.update(body)
        state.bodies.append(body)
        state.directions.append(direction)
    return refill(state, settings, rng)


def resolve(actions: Integers, directions: Integers, rng: np.random.Generator) -> list[int]:
    """[n] directions taken: the actions, with reversals replaced by one of the three other directions at random."""
    resolved = []
    for action, direction in zip(actions, directions, strict=True):
        others = [d for d in DIRECTIONS if d != direction ^ 1]
        resolved.append(int(action) if action in others else others[rng.integers(3)])
    return resolved


def advance(state: State, resolved: Integers, settings: Settings) -> Outcome:
    """Make the deterministic part of a step: moves, meals, collisions, rewards, respawns, the end.

    A snake is hit if the cell of its new head holds any other segment, once all have moved: then its reward is 3 minus
    its length before the step, otherwise 1 for a meal. A bean goes to the lowest index that reaches it.

    Args:
        state: before the step.
        resolved: [n] directions from `resolve`.
    """
    bodies = [list(body) for body in state.bodies]
    beans = list(state.beans)
    ate = []
    for body, direction in zip(bodies, resolved, strict=True):
        head = settings.neighbour(body[0], int(direction))
        body.insert(0, head)
        ate.append(head in beans)
        if ate[-1]:
            beans.remove(head)
        else:
            body.pop()
    segments = Counter(itertools.chain.from_iterable(bodies))
    hit = [segments[body[0]] > 1 for body in bodies]
    rewards = [
        START_LENGTH - len(old) if died else int(meal) for old, died, meal in zip(state.bodies, hit, ate, strict=True)
    ]
    after = State(
        bodies=[[] if died else body for body, died in zip(bodies, hit, strict=True)],
        directions=[int(direction) for direction in resolved],
        beans=beans,
        step_count=state.step_count + 1,
    )
    failed = not _respawn_all(after, hit, settings)
    full = settings.num_beans + sum(map(len, after.bodies)) > settings.height * settings.width
    done = after.step_count > settings.max_step or full or failed
    return Outcome(after, rewards, hit, done, {i: bodies[i] for i in itertools.compress(range(len(hit)), hit)})


def _respawn_all(state: State, hit: Sequence[bool], settings: Settings) -> bool:
    """Put the snakes that were hit back on the board, in index order; False if there was no room for one."""
    success = True
    for i in itertools.compress(range(len(hit)), hit):
        place = respawn(state.occupied(), settings)
        if place is None:
            success = False
        else:
            state.bodies[i], state.directions[i] = place
    return success


_SEARCH_ORDER = (RIGHT, DOWN, UP, LEFT)


def respawn(occupied: Collection[Cell], settings: Settings) -> tuple[list[Cell], int] | None:
    """Body and direction of a snake that starts again, or None if there is no room.

    The first cell s, row by row, that belongs to three connected free cells. With two or more free neighbours, first a
    then b in the order right, down, up, left, the body is a, s, b; but if a and b are on opposite sides it is s, a, b,
    which is no path: the head lies in the middle. With one free neighbour a it is s, a and a's first free neighbour.

    The direction leads from the second cell to the first, or, in s, a, b, from a to s. It is inverted where s and a
    face each other across the edge of the board. `fixed_respawn` undoes both oddities.
    """
    for s in settings.cells():
        if s in occupied:
            continue
        free = [d for d in _SEARCH_ORDER if settings.neighbour(s, d) not in occupied]
        if not free:
            continue
        a = settings.neighbour(s, free[0])
        across = abs(a[0] - s[0]) + abs(a[1] - s[1]) > 1 and not settings.fixed_respawn
        if len(free) >= 2:
            b = settings.neighbour(s, free[1])
            if free[1] == free[0] ^ 1 and not settings.fixed_respawn:
                return [s, a, b], free[0] ^ 1 ^ across
            return [a, s, b], free[0] ^ across
        for m in (settings.neighbour(a, d) for d in _SEARCH_ORDER):
            if m != s and m not in occupied:
                return [s, a, m], free[0] ^ 1 ^ across
    return None


def free_cells(state: State, settings: Settings) -> list[Cell]:
    """Cells without snake and bean, row by row."""
    occupied = state.occupied()
    return [cell for cell in settings.cells() if cell not in occupied]


def missing_beans(state: State, settings: Settings) -> int:
    """Number of beans that a refill adds: up to B on the board, as far as there are free cells."""
    return max(0, min(settings.num_beans - len(state.beans), settings.height * settings.width - len(state.occupied())))


def refill(state: State, settings: Settings, rng: np.random.Generator) -> State:
    """The state with new beans at the end of the list, drawn uniformly from the free cells, without repetition."""
    count = missing_beans(state, settings)
    if count == 0:
        return state
    free = free_cells(state, settings)
    drawn = rng.choice(len(free), size=count, replace=False)
    return replace(state, beans=state.beans + [free[k] for k in drawn])


def check_resolved(resolved: Integers, actions: Integers, directions: Integers) -> None:
    """Raise ValueError where `resolve` could not have led from the actions to these directions; all [n]."""
    for i, (heading, action, direction) in enumerate(zip(resolved, actions, directions, strict=True)):
        reversal = action == direction ^ 1
        if heading not in DIRECTIONS or (heading == action) == reversal:
            raise ValueError(f"snake {i} heads {direction}, is asked for {action} and cannot go {heading}.")


def check_new_beans(new: Sequence[Cell], state: State, settings: Settings) -> None:
    """Raise ValueError where `refill` could not have added these beans."""
    if len(new) != missing_beans(state, settings):
        raise ValueError(f"{len(new)} new beans, {missing_beans(state, settings)} are missing.")
    if len(set(new)) < len(new) or not state.occupied().isdisjoint(new):
        raise ValueError(f"new beans {list(new)} are not distinct free cells.")


class Game:
    """One game from reset to its end.

    Attributes:
        state: the state before the players choose.
        rewards, hit: [n] int and bool, changes of the game score and deaths of the last step.
        totals: [n] int, game scores since the reset.
        done: whether the game is over.
        ghosts: bodies of the snakes that have died since the reset, as the first fatal move left them.
    """

    def __init__(
        self, settings: Settings | None = None, rng: np.random.Generator | None = None, state: State | None = None
    ):
        """Start from `state`, or from a reset drawn from `rng`.

        Steps draw from `rng` too, unless they are given the outcomes of their draws.
        """
        self.settings = settings or Settings()
        self._rng = rng
        self.state = reset(self.settings, self.rng) if state is None else state
        self.rewards = np.zeros(self.settings.num_snakes, dtype=np.int64)
        self.hit = np.zeros(self.settings.num_snakes, dtype=bool)
        self.totals = np.zeros(self.settings.num_snakes, dtype=np.int64)
        self.done = False
        self.ghosts: dict[int, list[Cell]] = {}

    @property
    def rng(self) -> np.random.Generator:
        """The generator of all draws."""
        if self._rng is None:
            raise ValueError("this game has to draw: give it a generator, or the outcomes of its draws.")
        return self._rng

    @property
    def scores(self) -> np.ndarray:
        """[n] int: lengths less 3."""
        return np.array([len(body) - START_LENGTH for body in self.state.bodies])

    def step(
        self, actions: Integers, resolved: Integers | None = None, new_beans: Sequence[Cell] | None = None
    ) -> tuple[np.ndarray, bool]:
        """Make one step; returns rewards [n] and done.

        Args:
            actions: [n] direction codes.
            resolved: [n] directions after reversals were redrawn, to repeat another game's draws; checked.
            new_beans: the beans added at the end of the step, in order, likewise.
        """
        if self.done:
            raise ValueError("the game is over: start another one.")
        if resolved is None:
            resolved = resolve(actions, self.state.directions, self.rng)
        else:
            check_resolved(resolved, actions, self.state.directions)
        outcome = advance(self.state, resolved, self.settings)
        if new_beans is None:
            self.state = refill(outcome.state, self.settings, self.rng)
        else:
            check_new_beans(new_beans, outcome.state, self.settings)
            self.state = replace(outcome.state, beans=[*outcome.state.beans, *new_beans])
        self.rewards = np.array(outcome.rewards)
        self.hit = np.array(outcome.hit)
        self.done = outcome.done
        self.totals = self.totals + self.rewards
        self.ghosts = outcome.fallen | self.ghosts
        return self.rewards, self.done

    def observe(self, layout: str = "26", side: int = 0) -> np.ndarray:
        """Observations [A, D] float32 of the team of a side; see `observe`."""
        return observe(self.state, self.settings, layout, side)

    def shaped(self, variant: str = "original", side: int = 0) -> np.ndarray:
        """Rewards [A] float64 of the last step for the team of a side; see `shaped_rewards`.

        With "score" a team gets the change of its score minus the change of the other team's.
        """
        team = self.settings.team(side)
        if variant == "score" and self.settings.teams == 2:
            score = int(np.sum(self.rewards[team]))
            return np.full(len(team), float(2 * score - int(np.sum(self.rewards))))
        code = 0
        if self.settings.teams == 2:
            code = lead_code(self.done, *(int(self.totals[self.settings.team(s)].sum()) for s in (side, 1 - side)))
        return shaped_rewards(variant, self.state, self.rewards, self.hit, code, team)


# ---------------------------------------------------------------- observations


def code_map(state: State, settings: Settings) -> np.ndarray:
    """[H, W] int: 0 empty, 1 bean, k + 2 for a cell of snake k."""
    codes = np.zeros((settings.height, settings.width), dtype=np.int64)
    for cell in state.beans:
        codes[cell] = 1
    for k, body in enumerate(state.bodies):
        for cell in body:
            codes[cell] = k + 2
    return codes


def relabel(state: State, settings: Settings, side: int) -> State:
    """Return the state from a team's side: its snakes first, the others after them."""
    first = settings.team(side).start
    return replace(
        state,
        bodies=state.bodies[first:] + state.bodies[:first],
        directions=state.directions[first:] + state.directions[:first],
    )


def wrap(difference: int, size: int) -> int:
    """A difference of coordinates on a torus of that size; at exactly half of it both signs are kept."""
    if abs(difference) <= size // 2:
        return difference
    return difference - size if difference > 0 else difference + size


def observe(state: State, settings: Settings, layout: str = "26", side: int = 0) -> np.ndarray:
    """Observations [A, D] float32 of the snakes of a team, one row each; nothing is normalised.

    Cells are absolute (row, column); beans in list order, missing ones 0; "others" in index order; for the second side
    the snakes are relabelled. A snake off the board has a row of zeros, and zeros in the rows of the others.

    * "26": head, codes around it (up, down, left, right), beans, heads of the others: 6 + 2 B + 2 (n - 1) values.
    * "30": head, codes, two nearest beans, threats of the first two others, beans, 0, 0, heads of the first two others.
      For every controlled snake these two are its own teammates.
    * "35": head, codes, beans, two nearest beans, length / 20, heads of the others, threats of snakes 3 and 4.

    The last two exist for six snakes and five beans only.

    Args:
        layout: "26", "30" or "35".
        side: 0 for the first team, 1 for the second.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; use one of {LAYOUTS}.")
    if layout != "26" and (settings.num_snakes, settings.num_beans, settings.teams) != (6, 5, 2):
        raise ValueError(f"layout {layout!r} needs two teams of three snakes and five beans; use '26'.")
    state = relabel(state, settings, side)
    codes = code_map(state, settings)
    size = 6 + 2 * settings.num_beans + 2 * (settings.num_snakes - 1) if layout == "26" else int(layout)
    rows = np.zeros((settings.team_size, size), dtype=np.float32)
    for i in range(settings.team_size):
        if state.bodies[i]:
            rows[i] = _observe_one(i, state, codes, settings, layout)
    return rows


def _observe_one(i: int, state: State, codes: np.ndarray, settings: Settings, layout: str) -> list[float]:
    head = state.bodies[i][0]
    length = len(state.bodies[i])
    others = [k for k in range(settings.num_snakes) if k != i]
    around = [*head, *(float(codes[settings.neighbour(head, d)]) for d in DIRECTIONS)]
    beans = _flat(state.beans, settings.num_beans)
    if layout == "26":
        return [*around, *beans, *_heads(state, others)]
    if layout == "30":
        nearest = _two_nearest_beans(state, settings, head, missing=2.0 * settings.width)
        threats = [_threat(state, settings, head, k) / START_LENGTH for k in others[:2]]
        return [*around, *nearest, *threats, *beans, 0.0, 0.0, *_heads(state, others[:2])]
    nearest = _two_nearest_beans(state, settings, head, missing=0.0)
    threats = [_threat(state, settings, head, k) / length for k in (3, 4)]
    return [*around, *beans, *nearest, length / 20, *_heads(state, others), *threats]


def _flat(cells: Iterable[Cell], count: int) -> list[int]:
    values = list(itertools.chain.from_iterable(cells))
    return values + [0] * (2 * count - len(values))


def _heads(state: State, snakes: Sequence[int]) -> list[int]:
    return _flat((state.bodies[k][0] if state.bodies[k] else (0, 0) for k in snakes), len(snakes))


def _offset(settings: Settings, origin: Cell, target: Cell) -> tuple[int, int]:
    """Wrapped (dx, dy): columns, then rows."""
    return wrap(target[1] - origin[1], settings.width), wrap(target[0] - origin[0], settings.height)


def _two_nearest_beans(state: State, settings: Settings, head: Cell, missing: float) -> list[float]:
    """dx, dy, distance of the nearest and the second nearest bean; 0, 0, `missing` for one that is not there."""
    offsets = [_offset(settings, head, bean) for bean in state.beans]
    offsets.sort(key=lambda o: o[0] ** 2 + o[1] ** 2)  # stable: ties stay in list order
    nearest = [(float(dx), float(dy), math.hypot(dx, dy)) for dx, dy in offsets[:2]]
    nearest += [(0.0, 0.0, missing)] * (2 - len(nearest))
    return [*nearest[0], *nearest[1]]


def _threat(state: State, settings: Settings, head: Cell, k: int) -> float:
    """Length of snake k over the wrapped distance of its head plus 1."""
    if not state.bodies[k]:
        return 0.0
    return len(state.bodies[k]) / (math.hypot(*_offset(settings, head, state.bodies[k][0])) + 1e-8 + 1)


# ---------------------------------------------------------------- rewards


def lead_code(done: bool, ours: int, theirs: int) -> int:
    """Lead code: 0 level; at the end 1 the own team, 2 the other; before it 3 and 4. From game scores."""
    if ours == theirs:
        return 0
    return (1 if ours > theirs else 2) + (0 if done else 2)


_ORIGINAL_BASE = (0.0, 50.0, -25.0, 10.0, -5.0)  # by lead code
_V11_BASE = (0.0, 100.0, -100.0, 30.0, -30.0)


def shaped_rewards(
    variant: str, state: State, rewards: Integers, hit: Sequence[bool] | np.ndarray, code: int, snakes: Sequence[int]
) -> np.ndarray:
    """Rewards [len(snakes)] float64 of a step, for the learner.

    With r the change of the game score and m the plain (not wrapped) distance of the head to the nearest bean after the
    step, 0 without beans; "base" is a bonus by lead code:

    * "original": base + (20 if r > 0; else -m, and 10 less if r < 0).
    * "plus": the original, + 0.1 / (m + 1) if r <= 0, + 0.1 if r >= 0, + 0.05 if r > 0.
    * "v1.1": base' + 30 if r > 0, + (0.1 if r < 0 else -50), the sign is inverted as published.
    * "v1.1_fixed": base' + 30 if r > 0, + (-50 if the snake died else 0.1).
    * "score": r; for two teams see `Game.shaped`.

    All but "score" are 0 for a snake that could not respawn.

    Args:
        state: after the step, new beans and respawned heads included.
        rewards, hit: [n] changes of the game score and deaths of the step.
        code: of the team, from `lead_code`.
        snakes: indices of the rewarded snakes.
    """
    if variant not in REWARDS:
        raise ValueError(f"unknown reward {variant!r}; use one of {REWARDS}.")
    if variant == "score":
        return np.array([float(rewards[i]) for i in snakes])
    shaped = np.zeros(len(snakes))
    for place, i in enumerate(snakes):
        if state.bodies[i]:
            distance = min((math.dist(state.bodies[i][0], bean) for bean in state.beans), default=0.0)
            shaped[place] = _shape_reward(variant, int(rewards[i]), bool(hit[i]), distance, code)
    return shaped


def _shape_reward(variant: str, reward: int, hit: bool, distance: float, code: int) -> float:
    if variant in ("v1.1", "v1.1_fixed"):
        survived = reward < 0 if variant == "v1.1" else not hit
        return _V11_BASE[code] + 30.0 * (reward > 0) + (0.1 if survived else -50.0)
    total = _ORIGINAL_BASE[code] + (20.0 if reward > 0 else -distance - 10.0 * (reward < 0))
    if variant == "plus":
        total += 0.1 / (distance + 1) * (reward <= 0) + 0.1 * (reward >= 0) + 0.05 * (reward > 0)
    return total
