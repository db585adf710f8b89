"""Record what the NumPy oracles in `bench/` do, with which the parity tests compare the environments.

    python -m scripts.record_parity [--out FOLDER]

The files have the form of the recordings of the original systems, which are too large for the repository, and are
much smaller: four missions of coverage with tables of its rules, 300 steps of snakes, 40 short episodes of reach.
tests/data/README.md describes them.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.parity import metaworld
from bench.reference.coverage import baselines
from bench.reference.coverage import oracle as coverage_oracle
from bench.reference.coverage.oracle import Mission
from bench.reference.reach import oracle as reach_oracle
from bench.reference.snakes import opponents
from bench.reference.snakes import oracle as snakes_oracle
from bench.reference.snakes.oracle import Cell, State

OUT = Path(__file__).parents[1] / "tests" / "data"
Arrays = dict[str, np.ndarray]

# Coverage

RESOLUTIONS = (57, 28, 11, 7, 6, 5)  # q, of the tables
MISSION = coverage_oracle.Settings(q=7)
PROBES = 200  # cells whose beliefs are kept, and the four corners
CASES = 600  # of masks, for each set of actions
STRAIGHT = 0.55  # how often "momentum" repeats its last action, where it may


def half_plane(n: int, side: int, percent: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """Truth bool[n, n], and its rectangle: rows from and to, columns from and to."""
    truth = coverage_oracle.split_terrain(n, side, percent)
    rows, columns = (np.flatnonzero(truth.any(axis)) for axis in (1, 0))
    return truth, (rows[0], rows[-1] + 1, columns[0], columns[-1] + 1)


class Flight:
    """What is recorded of a mission at every measurement, whoever flies it."""

    def __init__(self, settings: coverage_oracle.Settings, rng: np.random.Generator, start: np.ndarray):
        truth, self.bounds = half_plane(coverage_oracle.map_side(settings.q), *self._draw(rng))
        self.mission = Mission(settings, rng, truth=truth, start=start, keep_measured=True)
        self.rows: list[dict[str, Any]] = []
        self.bits: list[np.ndarray] = []

    @staticmethod
    def _draw(rng: np.random.Generator) -> tuple[int, int]:
        return int(rng.integers(4)), int(rng.integers(30, 61))

    def note(self, **values: Any) -> None:
        """The present measurement, and more values of it."""
        sent = self.mission.measurements
        offset = sum(map(len, self.bits)) + np.cumsum([0, *(m.reading.size for m in sent[:-1])])
        self.bits += [m.reading.ravel() for m in sent]
        own = {
            "positions": np.int16(self.mission.positions),
            "footprint_full": np.int16(
                [coverage_oracle.footprint_full(m.position, self.mission.settings.q) for m in sent]
            ),
            "footprint": np.int16([m.box for m in sent]),
            "meas_offset": np.int32(offset),
        }
        self.rows.append(own | values)

    def arrays(self) -> Arrays:
        """All of the mission; what no measurement after the last step has is shorter by one."""
        found = {name: np.array([row[name] for row in self.rows if name in row]) for name in self.rows[0]}
        bits = np.concatenate(self.bits)
        return found | {
            "truth_bounds": np.int32(self.bounds),
            "meas_bits": np.packbits(bits),
            "meas_total_bits": np.int32(len(bits)),
        }


def statistics(belief: np.ndarray) -> np.ndarray:
    """float64[..., 3] of maps [..., n, n]: sums of p, of its squares and of its entropies."""
    return np.stack([x.sum(axis=(-2, -1)) for x in (belief, belief**2, coverage_oracle.entropy(belief))], axis=-1)


def chosen(
    policy: str, last: Sequence[int] | np.ndarray, rng: np.random.Generator, agent: int, mask: np.ndarray
) -> int:
    """An action of "uniform" or "momentum"."""
    if policy == "momentum" and rng.random() < STRAIGHT and len(last) and mask[last[agent]]:
        return int(last[agent])
    return int(rng.choice(np.flatnonzero(mask)))


def mission(settings: coverage_oracle.Settings, policy: str, number: int, start: np.ndarray | None = None) -> Arrays:
    """A mission of a random policy."""
    rng = np.random.default_rng(number)
    drawn = coverage_oracle.draw_start(rng, settings.num_agents, "uniform")
    flight = Flight(settings, rng, drawn if start is None else start)
    flown, n = flight.mission, flight.mission.n
    cells = np.union1d(rng.choice(n * n, PROBES, replace=False), [0, n - 1, n * (n - 1), n * n - 1])
    metrics = [flown.metrics(np.full((n, n), settings.prior))]
    actions: Any = ()
    while True:
        metrics.append(flown.metrics())
        maps = {"measured": flown.measured_beliefs, "global": flown.global_belief}
        if not flown.done:
            maps["fused"] = flown.local_beliefs
        seen = {
            f"belief_{kind}_probe": belief.reshape(*belief.shape[:-2], -1)[..., cells].astype(np.float32)
            for kind, belief in maps.items()
        }
        seen |= {f"belief_{kind}_stats": statistics(belief) for kind, belief in maps.items() if belief is not None}
        if flown.done:
            flight.note(**seen)
            break
        last = actions
        actions, masks = flown.act(lambda agent, mask, last=last: chosen(policy, last, rng, agent, mask))
        before, after = (coverage_oracle.entropy(p) for p in (flown.previous_global_belief, flown.global_belief))
        weight = coverage_oracle.class_weight(flown.global_belief)
        relative, absolute = coverage_oracle.utilities(before, after, weight)
        observed = flown.observe()
        flight.note(
            **seen,
            comm=np.uint8(flown.received),
            mask_boundary=np.uint8([coverage_oracle.boundary_mask(p, settings.num_actions) for p in flown.positions]),
            mask=np.uint8(masks),
            action=np.int8(actions),
            reward=coverage_oracle.reward(flown.previous_global_belief, flown.global_belief, settings),
            reward_abs=10.0 * absolute - 0.17,
            utility_rel=relative,
            utility_abs=absolute,
            done=np.uint8(flown.t == settings.budget),
            obs=observed,
            state_extra=flown.critic_state(actions, observed)[..., 7:],
        )
        flown.step(actions)
    config = {
        "n_agents": settings.num_agents, "budget": settings.budget, "num_actions": settings.num_actions,
        "pixel": settings.q, "range": settings.communication_range, "fix_range": settings.fix_range,
        "failure": settings.failure_rate, "seed": number, "episode": number, "policy": policy, "prior": settings.prior,
        "resolution_m": 1 / coverage_oracle.cells_per_metre(settings.q), "full": False,
    }  # fmt: skip
    evaluated = {"eval_entropy": "entropy", "eval_f1": "f1_strict", "eval_f1_tie0": "f1"}
    return (
        flight.arrays()
        | {name: np.array([row[key] for row in metrics]) for name, key in evaluated.items()}
        | {
            "config": np.array(json.dumps(config)),
            "grid": np.int32([n, n]),
            "comm_range": np.float32(flown.range),
            "probe_cells": np.int32(cells),
            "belief_global_final": flown.global_belief.astype(np.float32),
            "eps": np.float64(0),
        }
    )


def greedy(settings: coverage_oracle.Settings, number: int) -> Arrays:
    """A mission of the greedy baseline."""
    rng = np.random.default_rng(number)
    flight = Flight(settings, rng, coverage_oracle.draw_start(rng, settings.num_agents, "uniform"))
    flown = flight.mission
    metrics = [flown.metrics(np.full((flown.n, flown.n), settings.prior))]
    while not flown.done:
        masks = baselines.greedy_masks(flown)
        gains = baselines.raw_gains(flown, masks)
        targets = flown.positions[:, None, :] + coverage_oracle.MOVES[settings.num_actions]
        utility = baselines.discounted(baselines.normalised(gains), masks, targets)
        actions = baselines.ig_policy(flown)
        flight.note(
            comm=np.uint8(flown.received),
            mask=np.uint8(masks),
            raw_gain=gains,
            utility=utility,
            action=np.int8(actions),
        )
        flown.step(actions)
        metrics.append(flown.metrics())
    flight.note()
    arrays = flight.arrays()
    del arrays["footprint_full"]
    config = {
        "pixel": settings.q, "n_agents": settings.num_agents, "range": settings.communication_range, "episode": number,
        "communication": True, "budget": settings.budget, "num_actions": settings.num_actions,
    }  # fmt: skip
    evaluated = {"eval_entropy": "entropy", "eval_f1": "f1_strict"}
    return arrays | {name: np.array([row[key] for row in metrics]) for name, key in evaluated.items()} | {
        "config": np.array(json.dumps(config))
    }  # fmt: skip


def masks(num_actions: int, rng: np.random.Generator) -> Arrays:
    """Cases of action masks: an agent, and up to seven near it that have moved before."""
    spacing, levels = coverage_oracle.SPACING, len(coverage_oracle.ALTITUDES)
    shape = (coverage_oracle.LATTICE, coverage_oracle.LATTICE, levels)
    own = rng.integers(0, shape, (CASES, 3))
    own[::3, :2] = rng.choice([0, coverage_oracle.LATTICE - 1], own[::3, :2].shape)  # corners, where masks get empty
    others = own[:, None] + rng.integers(-1, 2, (CASES, 7, 3))
    others = np.clip(others, 0, np.array(shape) - 1)
    own, others = ((x + [0, 0, 1]) * spacing for x in (own, others))
    others[np.arange(7) >= rng.integers(0, 8, CASES)[:, None]] = -1
    boundary = [coverage_oracle.boundary_mask(place, num_actions) for place in own]
    final = [
        coverage_oracle.collision_mask(mask, place, near[(near >= 0).all(-1)])
        for mask, place, near in zip(boundary, own, others, strict=True)
    ]
    return {"own": np.int16(own), "others": np.int16(others), "boundary": np.uint8(boundary), "final": np.uint8(final)}


def targets(rng: np.random.Generator) -> Arrays:
    """TD targets of one row of five missions, as the original computes them."""
    steps, settings = 75, (0.99, 0.8)
    reward, done = rng.normal(size=steps), np.uint8(np.arange(1, steps + 1) % 15 == 0)
    q = rng.normal(size=steps).astype(np.float32)
    target, returns = coverage_oracle.td_targets_original(reward, done, q, *settings)
    return {
        "gamma_lambda": np.array(settings), "reward": reward, "done": done, "q": q, "target": target, "return": returns
    }  # fmt: skip


def coverage() -> Arrays:
    """parity_coverage.npz"""
    failing = replace(MISSION, failure_rate=0.3)
    met = coverage_oracle.SPACING * np.array([[2, 2, 3], [9, 1, 3], [5, 6, 3], [5, 6, 3]])  # two in one place
    rng = np.random.default_rng(4)
    parts = {
        "m00": mission(MISSION, "uniform", 1),
        "m01": mission(failing, "momentum", 2, met),
        "m02": mission(replace(MISSION, q=57), "uniform", 5),  # the published resolution
        "ig0": greedy(MISSION, 3),
        **{f"mask{number}": masks(number, rng) for number in coverage_oracle.MOVES},
        "td0": targets(rng),
    }
    arrays = {f"{part}_{name}": x for part, found in parts.items() for name, x in found.items()}
    arrays["n_missions"] = np.int32(3)
    altitudes = coverage_oracle.ALTITUDES
    for q in RESOLUTIONS:
        rows = [
            [(5 * i, 5 * i, z) for i in range(coverage_oracle.LATTICE)] for z in altitudes
        ]  # the same along both axes
        both = [[(coverage_oracle.footprint_full(p, q), coverage_oracle.footprint(p, q)) for p in row] for row in rows]
        arrays[f"tab_footprint_px{q}"] = np.int16([[(*full[:2], *seen[:2]) for full, seen in row] for row in both])
    sides = {coverage_oracle.map_side(q) for q in RESOLUTIONS}
    sides |= {2 * coverage_oracle.radius(z, q) for z in altitudes for q in RESOLUTIONS}
    for n in sorted(sides):
        arrays[f"tab_resize_{n}"] = coverage_oracle.area_matrix(n).astype(np.float32)
    for q in (57, 7):
        n = coverage_oracle.map_side(q)
        table = [[half_plane(n, side, 30 + i)[1] for i in range(31)] for side in range(4)]
        arrays[f"tab_truth_bounds_px{q}"] = np.int16(table)
    return arrays


# Snakes

BOARDS = [(3, 4, 3, 2, 50), (6, 8, 2, 5, 50), (10, 20, 6, 5, 200)]
PLAYED = CROWDED = 50  # steps of each board, from play and from crowded positions
MOST_CELLS = 64  # of a snake
SHAPED = {"shaped_orig": "original", "shaped_v11": "v1.1", "shaped_plus": "plus"}


def walk(settings: snakes_oracle.Settings, taken: set[Cell], rng: np.random.Generator) -> list[Cell]:
    """A body of three to fourteen cells that are free."""
    while True:
        body = [(int(rng.integers(settings.height)), int(rng.integers(settings.width)))]
        for _ in range(int(rng.integers(2, 14))):
            ways = {settings.neighbour(body[-1], d) for d in snakes_oracle.DIRECTIONS}
            ways = ways - taken - set(body)
            if ways:
                body.append(sorted(ways)[rng.integers(len(ways))])
        if len(body) >= snakes_oracle.START_LENGTH and body[0] not in taken:
            return body


def crowded(settings: snakes_oracle.Settings, rng: np.random.Generator) -> State:
    """Long winding snakes anywhere, some with a stored direction that their bodies do not tell."""
    while True:
        bodies: list[list[Cell]] = []
        for _ in range(settings.num_snakes):
            taken = {cell for body in bodies for cell in body}
            limit = (settings.height * settings.width - settings.num_beans - len(taken)) // (
                settings.num_snakes - len(bodies)
            )
            if limit < snakes_oracle.START_LENGTH:
                break
            bodies.append(walk(settings, taken, rng)[:limit])
        else:
            break
    directions = [
        next(d for d in snakes_oracle.DIRECTIONS if settings.neighbour(body[1], d) == body[0])
        if rng.random() < 0.93
        else int(rng.integers(4))
        for body in bodies
    ]
    state = State(bodies, directions, [], int(rng.integers(1, settings.max_step + 1)))
    return snakes_oracle.refill(state, settings, rng)


def drawn_action(state: State, settings: snakes_oracle.Settings, rng: np.random.Generator) -> list[int]:
    """Actions of all snakes: mostly towards beans, blindly or not, some at random."""
    everyone = range(settings.num_snakes)
    ways = [opponents.choose(state, settings, everyone, level) for level in (1, 4)]
    ways.append([int(x) for x in rng.integers(4, size=len(everyone))])
    return [ways[k][i] for i, k in enumerate(rng.choice(3, len(everyone), p=(0.2, 0.5, 0.3)))]


def padded(cells: Sequence[Cell], settings: snakes_oracle.Settings, size: int) -> list[int]:
    """Flat indices, -1 after them."""
    return [r * settings.width + c for r, c in cells] + [-1] * (size - len(cells))


def choices(state: State, settings: snakes_oracle.Settings) -> np.ndarray:
    """int16[5, 3]: what the scripted players choose for the second team, -1 where the board has too few beans."""
    found = np.full((5, 3), -1, np.int16)
    if settings.teams == 2:
        team = settings.team(1)
        for place, level in enumerate((1, 2, 3, 4, opponents.EVASION)):
            if len(state.beans) >= (len(team) if level == 2 else 1):
                found[place, : len(team)] = opponents.choose(state, settings, team, level)
    return found


def transition(
    before: State, settings: snakes_oracle.Settings, source: int, rng: np.random.Generator
) -> tuple[dict[str, Any], State, bool]:
    """A recorded step, the state after it, and whether the game is over."""
    action = drawn_action(before, settings, rng)
    resolved = snakes_oracle.resolve(action, before.directions, rng)
    outcome = snakes_oracle.advance(before, resolved, settings)
    after = snakes_oracle.refill(outcome.state, settings, rng)
    code, number = int(rng.integers(5)), settings.num_snakes

    def by_snake(values: Any) -> Any:
        return np.int16([*map(int, values), *[0] * (6 - number)])

    row: dict[str, Any] = {
        "board_h": settings.height, "board_w": settings.width, "n_snakes": number, "n_beans": settings.num_beans,
        "max_step": settings.max_step, "source": source,
        "action": by_snake(action), "resolved": by_snake(resolved),
        "n_beans_kept": len(outcome.state.beans), "reward": by_snake(outcome.rewards), "hit": by_snake(outcome.hit),
        "done": outcome.done, "opp_action": choices(before, settings), "score_code": code,
    }  # fmt: skip
    for when, state in (("before", before), ("after", after)):
        bodies = [*state.bodies, *[[]] * (6 - number)]
        row[f"seg_{when}"] = [padded(body, settings, MOST_CELLS) for body in bodies]
        row[f"len_{when}"] = [len(body) for body in bodies]
        row[f"dir_{when}"] = by_snake(state.directions)
        row[f"beans_{when}"] = padded(state.beans, settings, 5)
        row[f"step_{when}"] = state.step_count
    valid = number == 6 and all(after.bodies) and bool(after.beans)
    row["shaped_valid"] = valid
    for name, variant in SHAPED.items():
        paid = (
            snakes_oracle.shaped_rewards(variant, after, outcome.rewards, outcome.hit, code, range(3))
            if valid
            else np.zeros(3)
        )
        row[name] = paid.astype(np.float32)
    if number == 6 and len(before.beans) == 5:
        row["observation"] = {
            f"obs{layout}": snakes_oracle.observe(before, settings, layout) for layout in ("26", "30", "35")
        }
    return row, after, outcome.done


def played(settings: snakes_oracle.Settings, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Steps of games, one after another."""
    while True:
        state, done = snakes_oracle.reset(settings, rng), False
        while not done:
            row, state, done = transition(state, settings, 0, rng)
            yield row


def snakes() -> Arrays:
    """parity_snakes.npz"""
    rng, rows = np.random.default_rng(5), []
    for height, width, number, beans, limit in BOARDS:
        settings = snakes_oracle.Settings(height, width, number, beans, limit, teams=1 if number % 2 else 2)
        start = limit - PLAYED // 2  # a game's end, with long snakes, and the beginning of the next
        rows += itertools.islice(played(settings, rng), start, start + PLAYED)
        rows += [transition(crowded(settings, rng), settings, 1, rng)[0] for _ in range(CROWDED)]
    shown = [k for k, row in enumerate(rows) if "observation" in row]
    observed = {
        name: np.array([rows[k]["observation"][name] for k in shown], np.int16 if name == "obs26" else np.float32)
        for name in ("obs26", "obs30", "obs35")
    }
    names = [name for name in rows[0] if name != "observation"]
    columns = {name: np.array([row[name] for row in rows]) for name in names}
    return (
        {name: x if x.dtype == np.float32 else x.astype(np.int16) for name, x in columns.items()}
        | {"obs_row": np.int32(shown)}
        | observed
    )


# Reach

EPISODES, PERIODS = 40, 24
NEAR = 0.1  # m, how far goals lie from a place beside the start, along each axis: some are reached in time


def reach() -> Arrays:
    """parity_reach.npz"""
    rng = np.random.default_rng(6)
    policy = np.array(metaworld.POLICIES)[np.arange(EPISODES) * len(metaworld.POLICIES) // EPISODES]
    puck = np.array([0.0, 0.65, 0.02]) + rng.uniform(-0.1, 0.1, (EPISODES, 3)) * [1, 0.5, 0]
    goal = np.array([0.0, 0.65, 0.2]) + rng.uniform(-NEAR, NEAR, (EPISODES, 3))
    arms = reach_oracle.Arms(puck, goal)
    acts = [metaworld.actor(name, place, rng) for name, place in zip(policy, goal, strict=True)]

    def state() -> Any:
        return {
            "obs": arms.observe(), "tcp": reach_oracle.tool_centre(arms.q), "mocap_pos": arms.target,
            "qpos": arms.q.copy(), "qvel": arms.v.copy(),
        }  # fmt: skip

    states, steps = [state()], []
    for _ in range(PERIODS):
        action = np.array([act(hand) for act, hand in zip(acts, states[-1]["obs"][:, :3], strict=True)])
        reward, success = arms.step(action)
        states.append(state())
        steps.append({"action": action, "reward": reward, "success": success})
    made = {name: np.stack([row[name] for row in states], axis=1) for name in states[0]}
    made |= {name: np.stack([row[name] for row in steps], axis=1) for name in steps[0]}
    # the simulator's state goes on with the puck: its place and quaternion, and that it rests
    start = [puck, np.tile([1.0, 0.0, 0.0, 0.0], (EPISODES, 1))]
    whole = {
        "qpos0": np.concatenate([made["qpos"][:, 0], *start], axis=1),
        "qvel0": np.concatenate([made["qvel"][:, 0], np.zeros((EPISODES, 6))], axis=1),
    }
    del made["qpos"], made["qvel"]
    return (
        {name: x if x.dtype == bool else x.astype(np.float32) for name, x in made.items()}
        | whole
        | {"goal": goal, "obj_init": puck, "policy": policy, "contact": np.zeros((EPISODES, PERIODS, 3), np.int16)}
    )


RECORDS = {"parity_coverage": coverage, "parity_snakes": snakes, "parity_reach": reach}


def main() -> None:
    """Write the files that tests read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the files")
    out = parser.parse_args().out
    for name, record in RECORDS.items():
        path = out / f"{name}.npz"
        np.savez_compressed(path, **record())  # type: ignore[arg-type]
        print(f"wrote {path}: {path.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
