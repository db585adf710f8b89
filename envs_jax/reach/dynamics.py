"""The arm without contacts: nine joints under a soft weld that pulls the hand to a target, and soft joint limits.

Within rounding, this is what MuJoCo does as long as the gripper touches nothing. Every number is a separate array over
the arms, which do not touch each other: the trailing axes of q and v are the batch, none for one arm. Directions are in
the frames of the links; rotations by right angles cost nothing (see `folding`). Order of joints: seven hinges, right
finger, left finger.

Sources: R. Featherstone, "Rigid Body Dynamics Algorithms", 2008, for the recursions (Newton-Euler, composite bodies);
E. Todorov, "Convex and analytically-invertible dynamics with contacts and constraints", ICRA 2014, and the chapter
"Computation" of MuJoCo's documentation for soft constraints.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array
from envs_jax.reach import constants
from envs_jax.reach.constants import HINGES, Arm, Link, Softness
from envs_jax.reach.folding import (
    Matrix,
    Number,
    Vector,
    add,
    apply,
    cross,
    dot,
    materialize,
    mul,
    plus,
    scale,
    sub,
    transpose,
)

SOLVES = 3  # for the set of active limits; two suffice except once in 350,000 physics steps, and no step needed four
_TARGET = ((0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (-1.0, 0.0, 0.0))  # the target's fixed rotation


class Turn(NamedTuple):
    """Sine and cosine of a hinge."""

    sin: Number
    cos: Number


def _numbers(values: np.ndarray) -> Any:
    """Python floats, which fold."""
    return values.tolist()


def _about_z(turn: Turn, v: Vector) -> list[Number]:
    x, y, z = v
    return [sub(mul(turn.cos, x), mul(turn.sin, y)), add(mul(turn.sin, x), mul(turn.cos, y)), z]


def _to_parent(link: Link, turn: Turn, v: Vector) -> list[Number]:
    """Rotate a direction from a hinge's frame to its parent's."""
    return apply(_numbers(link.rotation), _about_z(turn, v))


def _from_parent(link: Link, turn: Turn, v: Vector) -> list[Number]:
    return _about_z(Turn(mul(-1.0, turn.sin), turn.cos), apply(_numbers(link.rotation.T), v))


# Kinematics


class Hand(NamedTuple):
    """The frame of the hand, and its derivatives by hinges."""

    position: Vector  # [3], in the world
    rotation: Matrix  # [3][3], columns are the hand's axes in the world
    axes: list[list[Number]]  # [7][3], axis of every hinge, in the hand's frame
    levers: list[list[Number]]  # [7][3], velocity of the hand's origin for unit speed of every hinge, in its frame


@materialize
def hand(arm: Arm, turns: Sequence[Turn]) -> Hand:
    """Return the hand, computed from the last link to the world."""
    to_hand = _numbers(arm.hand_rotation.T)  # a direction in the link, in the hand's frame
    place: list[Number] = _numbers(arm.hand_shift)
    axes: list[list[Number]] = []
    levers: list[list[Number]] = []
    for link, turn in zip(reversed(arm.links[:HINGES]), reversed(turns), strict=True):
        axes.insert(0, [row[2] for row in to_hand])
        levers.insert(0, apply(to_hand, cross((0.0, 0.0, 1.0), place)))
        place = plus(_numbers(link.shift), _to_parent(link, turn, place))
        to_hand = [_to_parent(link, turn, row) for row in to_hand]
    return Hand(place, transpose(to_hand), axes, levers)


def _tool(arm: Arm, frame: Hand, right: Number, left: Number) -> list[Number]:
    """[3], mean of the fingertips in the world; the fingers slide along the hand's y axis."""
    return plus(frame.position, apply(frame.rotation, [arm.site, mul(0.5, add(right, left)), 0.0]))


class Pose(NamedTuple):
    """Observed pose: hand [3, ...], tool centre [3, ...] in m, opening [...] of the gripper in [0, 1]."""

    hand: Array
    tool: Array
    opening: Array


def _turns(q: Array | Sequence[Array]) -> list[Turn]:
    return [Turn(jnp.sin(x), jnp.cos(x)) for x in q[:HINGES]]


def _stack(v: Vector, q: Array) -> Array:
    return jnp.stack([jnp.broadcast_to(x, q[0].shape) for x in v])


def pose_numbers(q: Array | Sequence[Array]) -> list[Number]:
    """[7]: hand, tool centre and opening of joint values [9]; see `Pose`."""
    arm = constants.arm()
    frame = hand(arm, _turns(q))
    opening = jnp.clip((0.1 - (q[7] - q[8])) / 0.1, 0.0, 1.0)
    return [*frame.position, *_tool(arm, frame, q[7], q[8]), opening]


@jax.jit
def pose(q: Array) -> Pose:
    """Return hand, tool centre and gripper of joint values q [9, ...]."""
    *places, opening = pose_numbers(q)
    return Pose(_stack(places[:3], q), _stack(places[3:], q), jnp.asarray(opening))


@jax.jit
def skeleton(q: Array) -> Array:
    """[9, 3, ...]: origins of the seven links from the base on, of the hand, and the tool centre, in the world."""
    arm = constants.arm()
    turns = _turns(q)
    points = []
    for count in range(1, HINGES + 1):
        place: list[Number] = [0.0, 0.0, 0.0]
        for link, turn in zip(reversed(arm.links[:count]), reversed(turns[:count]), strict=True):
            place = plus(_numbers(link.shift), _to_parent(link, turn, place))
        points.append(place)
    frame = hand(arm, turns)
    points += [list(frame.position), _tool(arm, frame, q[7], q[8])]
    return jnp.stack([_stack(point, q) for point in points])


# Inertia and forces


class Body(NamedTuple):
    """Mass (known), first moment [3] and inertia about the frame's origin, entries xx, yy, zz, xy, xz, yz."""

    mass: float
    moment: list[Number]
    inertia: list[Number]

    @property
    def matrix(self) -> Matrix:
        xx, yy, zz, xy, xz, yz = self.inertia
        return [[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]]


_ENTRIES = ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2))


def _point(mass: float, place: Vector) -> list[Number]:
    square = dot(place, place)
    return [mul(mass, sub(square if i == j else 0.0, mul(place[i], place[j]))) for i, j in _ENTRIES]


def _join(*bodies: Body) -> Body:
    moments = [body.moment for body in bodies]
    inertias = [body.inertia for body in bodies]
    return Body(sum(body.mass for body in bodies), plus(*moments), plus(*inertias))


def _body(link: Link) -> Body:
    steiner = float(link.com @ link.com) * np.eye(3) - np.outer(link.com, link.com)
    inertia = link.inertia + link.mass * steiner  # about the origin of the link's frame
    return Body(link.mass, _numbers(link.mass * link.com), [float(inertia[e]) for e in _ENTRIES])


def _body_to_parent(link: Link, turn: Turn, body: Body) -> Body:
    """Transform a body from a hinge's frame to its parent's."""
    xx, yy, zz, xy, xz, yz = body.inertia
    half, mean = mul(0.5, sub(xx, yy)), mul(0.5, add(xx, yy))
    sin2 = mul(2.0, mul(turn.sin, turn.cos))
    cos2 = sub(1.0, mul(2.0, mul(turn.sin, turn.sin)))
    change = sub(mul(cos2, half), mul(sin2, xy))
    x, y, _ = _about_z(turn, (xz, yz, 0.0))
    mixed = add(mul(sin2, half), mul(cos2, xy))
    rows = [[add(mean, change), mixed, x], [mixed, sub(mean, change), y], [x, y, zz]]
    rotation = _numbers(link.rotation)
    shift = _numbers(link.shift)
    half_way = transpose([apply(rotation, row) for row in rows])  # rotation . I
    turned = [apply(rotation, row) for row in half_way]
    moment = _to_parent(link, turn, body.moment)
    twice = mul(2.0, dot(shift, moment))
    inertia = [
        add(turned[i][j], twice if i == j else 0.0, mul(-shift[i], moment[j]), mul(-shift[j], moment[i]))
        for i, j in _ENTRIES
    ]
    point = [float(x) for x in _point(body.mass, shift)]
    return Body(body.mass, plus(moment, scale(body.mass, shift)), plus(inertia, point))


class Finger(NamedTuple):
    """A finger on the last link: its place [3], the direction it slides in [3] (known), mass and inertia [3][3]."""

    place: list[Number]
    axis: list[float]
    mass: float
    inertia: Matrix

    @property
    def body(self) -> Body:
        """The finger's `Body` in the frame of the last link."""
        inertia = plus([self.inertia[i][j] for i, j in _ENTRIES], _point(self.mass, self.place))
        return Body(self.mass, scale(self.mass, self.place), inertia)


def _finger(link: Link, x: Array) -> Finger:
    axis = _numbers(link.rotation[:, 1])
    turned = _numbers(link.rotation @ link.inertia @ link.rotation.T)
    return Finger(plus(_numbers(link.shift), scale(x, axis)), axis, link.mass, turned)


_NO_LOADS: list[tuple[Vector, Vector]] = [((0.0, 0.0, 0.0),) * 2] * HINGES


def _down(
    arm: Arm, turns: Sequence[Turn], last: int, force: Vector, moment: Vector, loads: Sequence[Any] = _NO_LOADS
) -> list[Number]:
    """[last + 1]: torques of the hinges 0 .. last that balance a force and a moment about the origin of link `last`.

    `loads` are a force and a moment more for each of the links before it.
    """
    torques = [moment[2]]
    for i in range(last, 0, -1):
        carried = _to_parent(arm.links[i], turns[i], force)
        turned = _to_parent(arm.links[i], turns[i], moment)
        force = plus(loads[i - 1][0], carried)
        moment = plus(loads[i - 1][1], turned, cross(_numbers(arm.links[i].shift), carried))
        torques.insert(0, moment[2])
    return torques


@materialize
def mass_matrix(arm: Arm, turns: Sequence[Turn], fingers: Sequence[Finger]) -> tuple[list[list[Number]], list[Number]]:
    """Lower triangle [7][i + 1] of the hinges, armature included, and their coupling [7] with either finger."""
    rows: list[list[Number]] = []
    bodies = [_join(_body(arm.links[HINGES - 1]), *(finger.body for finger in fingers))]
    for i in range(HINGES - 1, 0, -1):
        bodies.insert(0, _join(_body(arm.links[i - 1]), _body_to_parent(arm.links[i], turns[i], bodies[0])))
    for i, body in enumerate(bodies):
        force = cross((0.0, 0.0, 1.0), body.moment)
        row = _down(arm, turns, i, force, [line[2] for line in body.matrix])
        row[i] = add(row[i], arm.links[i].armature)
        rows.append(row)
    first, second = fingers
    pushes = [(scale(f.mass, f.axis), cross(f.place, scale(f.mass, f.axis))) for f in (first, second)]
    assert pushes[0] == pushes[1], "the fingers slide in a plane with the last axis, so that both couple alike"
    return rows, _down(arm, turns, HINGES - 1, *pushes[0])


@materialize
def bias(arm: Arm, turns: Sequence[Turn], fingers: Sequence[Finger], v: Sequence[Array]) -> list[Number]:
    """[9]: joint forces without acceleration: gravity, Coriolis and centrifugal forces (recursive Newton-Euler)."""
    spin: list[Number] = [0.0, 0.0, 0.0]
    turning: list[Number] = [0.0, 0.0, 0.0]  # angular acceleration
    rising: list[Number] = [0.0, 0.0, arm.gravity]  # acceleration of the frame's origin
    forces = []
    moments = []
    gradient: list[list[Number]] = [[0.0] * 3] * 3
    for i, link in enumerate(arm.links[:HINGES]):
        rising = _from_parent(link, turns[i], plus(rising, apply(gradient, _numbers(link.shift))))
        spin = _from_parent(link, turns[i], spin)
        turning = plus(_from_parent(link, turns[i], turning), [mul(v[i], spin[1]), mul(-v[i], spin[0]), 0.0])
        spin = plus(spin, [0.0, 0.0, v[i]])
        gradient = _gradient(spin, turning)
        body = _body(link)
        forces.append(plus(scale(body.mass, rising), apply(gradient, body.moment)))
        moments.append(plus(cross(body.moment, rising), _rotational(body.matrix, spin, turning)))
    extra = []
    for finger, speed in zip(fingers, v[HINGES:], strict=True):
        sliding = cross(spin, scale(mul(2.0, speed), finger.axis))
        force = scale(finger.mass, plus(rising, apply(gradient, finger.place), sliding))
        extra.append(dot(finger.axis, force))
        forces[-1] = plus(forces[-1], force)
        moments[-1] = plus(moments[-1], cross(finger.place, force), _rotational(finger.inertia, spin, turning))
    loads = list(zip(forces, moments, strict=True))
    return _down(arm, turns, HINGES - 1, *loads[-1], loads) + extra


def _gradient(spin: Vector, turning: Vector) -> list[list[Number]]:
    """[3][3]: acceleration of points fixed in a frame, relative to its origin, per place: [turning]x + [spin]x^2."""
    x, y, z = spin
    xx = mul(x, x)
    yy = mul(y, y)
    zz = mul(z, z)
    xy = mul(x, y)
    xz = mul(x, z)
    yz = mul(y, z)
    a, b, c = turning
    return [
        [mul(-1.0, add(yy, zz)), sub(xy, c), add(xz, b)],
        [add(xy, c), mul(-1.0, add(xx, zz)), sub(yz, a)],
        [sub(xz, b), add(yz, a), mul(-1.0, add(xx, yy))],
    ]


def _rotational(inertia: Matrix, spin: Vector, turning: Vector) -> list[Number]:
    """I turning + spin x (I spin)."""
    return plus(apply(inertia, turning), cross(spin, apply(inertia, spin)))


# Constraints


def _impedance(softness: Softness, violation: Array) -> Array:
    x = jnp.minimum(violation * (1.0 / softness.width), 1.0)
    rest = 1.0 - x
    y = jnp.where(x <= 0.5, 2.0 * x * x, 1.0 - 2.0 * rest * rest)
    return softness.least + (softness.most - softness.least) * y


class Weld(NamedTuple):
    """Six rows: Jacobian [7][6], the same times the rows' weights, and reference accelerations [6]."""

    rows: list[list[Number]]
    weighted: list[list[Number]]
    reference: list[Number]


@materialize
def weld(arm: Arm, frame: Hand, target: Vector, v: Sequence[Array], torque_scale: Array) -> Weld:
    """Return the weld, in the hand's frame: the three rows of a kind have equal weights, so any frame will do."""
    inverse = transpose(frame.rotation)
    shift = apply(inverse, [sub(t, p) for t, p in zip(target, frame.position, strict=True)])
    turned = [apply(transpose(_TARGET), row) for row in inverse]  # R_h^T R_t
    trace = add(turned[0][0], turned[1][1], turned[2][2])
    scalar = 0.5 * jnp.sqrt(jnp.maximum(add(trace, 1.0), 1e-6))  # the unit quaternion's
    across = [sub(turned[j][i], turned[i][j]) for i, j in ((1, 2), (2, 0), (0, 1))]
    vector = scale(0.25 / scalar, across)
    error = [*shift, *scale(torque_scale, vector)]
    imp = _impedance(arm.weld, jnp.sqrt(jnp.asarray(dot(error, error))))
    rows = []
    half = 0.5 * torque_scale
    for axis, lever in zip(frame.axes, frame.levers, strict=True):
        rotational = plus(scale(mul(-half, scalar), axis), scale(-half, cross(axis, vector)))
        rows.append([*scale(-1.0, lever), *rotational])
    ratio = imp / (1.0 - imp)
    weights = [ratio * (1.0 / w) for w in arm.hand_weights for _ in range(3)]
    weighted = [[mul(w, x) for w, x in zip(weights, row, strict=True)] for row in rows]
    pull = arm.weld.stiffness * imp
    speeds = [dot([row[k] for row in rows], v[:HINGES]) for k in range(6)]
    reference = [sub(mul(-arm.weld.damping, s), mul(pull, e)) for s, e in zip(speeds, error, strict=True)]
    return Weld(rows, weighted, reference)


class Limit(NamedTuple):
    """Row of a joint's limits: whether violated, sign, weight and reference acceleration."""

    violated: Array
    sign: Array
    weight: Array
    reference: Array


def limit(softness: Softness, link: Link, q: Array, v: Array) -> Limit:
    """Return the limits of a joint; they push back where it is beyond its range."""
    below = link.low - q
    above = q - link.high
    depth = jnp.maximum(below, above)
    one = q.dtype.type(1)
    sign = jnp.where(below > above, one, -one)
    imp = _impedance(softness, jnp.maximum(depth, 0.0))
    weight = imp / ((1.0 - imp) * link.inverse_weight)
    reference = softness.stiffness * imp * depth - softness.damping * sign * v
    return Limit(depth > 0.0, sign, weight, reference)


# Linear algebra


def _solve(matrix: Sequence[Sequence[Number]], right: Sequence[Number]) -> list[Number]:
    """Return the x with L D L^T x = right, for a positive definite matrix, lower triangle [n][i + 1]."""
    lower: list[list[Number]] = []  # strict triangle of L
    inverse: list[Number] = []  # 1 / D
    for i, row in enumerate(matrix):
        scaled: list[Number] = []  # entries of L times D
        for j in range(i):
            scaled.append(sub(row[j], dot(scaled, lower[j])))
        entries = [mul(x, d) for x, d in zip(scaled, inverse, strict=True)]
        lower.append(entries)
        inverse.append(1.0 / sub(row[i], dot(scaled, entries)))
    y: list[Number] = []
    for b, row in zip(right, lower, strict=True):
        y.append(sub(b, dot(row, y)))
    x = [mul(a, d) for a, d in zip(y, inverse, strict=True)]
    for i in range(len(x) - 1, -1, -1):
        below = range(i + 1, len(x))
        x[i] = sub(x[i], dot([lower[k][i] for k in below], [x[k] for k in below]))
    return x


def _solve_with_fingers(
    matrix: Sequence[Sequence[Number]], coupling: Sequence[Number], fingers: Sequence[Number], right: Sequence[Number]
) -> list[Number]:
    """Solve for all nine joints; the fingers, coupled with the hinges only, are eliminated first.

    `matrix` is the lower triangle [7][i + 1] of the hinges, `fingers` [2] are the diagonal entries of the fingers.
    """
    inverse = [1.0 / x for x in fingers]
    both = add(*inverse)
    drop = scale(both, coupling)
    reduced = [[sub(x, mul(drop[i], coupling[j])) for j, x in enumerate(row)] for i, row in enumerate(matrix)]
    pushed = dot(inverse, right[HINGES:])
    hinges = _solve(reduced, [sub(b, mul(pushed, g)) for b, g in zip(right, coupling, strict=False)])
    moved = dot(coupling, hinges)
    return hinges + [mul(x, sub(b, moved)) for x, b in zip(inverse, right[HINGES:], strict=True)]


# One physics step


class Motion(NamedTuple):
    """Joint values [9] in rad and m, and their speeds [9] in rad/s and m/s."""

    q: list[Array]
    v: list[Array]


def step(arm: Arm, motion: Motion, target: Vector, grip: Array, torque_scale: Array) -> Motion:
    """Return the motion one physics step later.

    Args:
        arm: constants.
        motion: of the nine joints.
        target: [3], the weld pulls the hand there, m.
        grip: command of the fingers in [-1, 1], 1 = close.
        torque_scale: float[], weight of the weld's rotation.
    """
    q, v = motion
    turns = _turns(q)
    fingers = [_finger(*pair) for pair in zip(arm.links[HINGES:], q[HINGES:], strict=True)]
    matrix, coupling = mass_matrix(arm, turns, fingers)
    weld_rows = weld(arm, hand(arm, turns), target, v, torque_scale)
    servo = [0.0] * HINGES + [arm.gain * (grip - q[7]), arm.gain * (-grip - q[8])]
    force = [
        add(push, mul(-link.damping, speed), mul(-1.0, drag))
        for push, link, speed, drag in zip(servo, arm.links, v, bias(arm, turns, fingers, v), strict=True)
    ]
    stiff = [
        [add(x, dot(weld_rows.weighted[i], weld_rows.rows[j])) for j, x in enumerate(row)]
        for i, row in enumerate(matrix)
    ]
    heavy: list[Number] = [link.mass + link.armature for link in arm.links[HINGES:]]
    right = [add(f, dot(row, weld_rows.reference)) for f, row in zip(force, weld_rows.weighted, strict=False)]
    right += force[HINGES:]
    bounds = [limit(arm.limit, *joint) for joint in zip(arm.links, q, v, strict=True)]

    def attempt(_: int, state: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
        """Solve with the limits that are active, then keep those that push."""
        active = state[1]
        weights = [jnp.where(on, bound.weight, 0.0) for on, bound in zip(active, bounds, strict=True)]
        pushes = [weight * bound.sign * bound.reference for weight, bound in zip(weights, bounds, strict=True)]
        held = [[*row[:-1], add(row[-1], w)] for row, w in zip(stiff, weights, strict=False)]
        ends = [add(x, w) for x, w in zip(heavy, weights[HINGES:], strict=True)]
        solved = _solve_with_fingers(held, coupling, ends, plus(right, pushes))
        acceleration = [jnp.asarray(x) for x in solved]
        return acceleration, [
            bound.violated & (bound.sign * x < bound.reference) for x, bound in zip(acceleration, bounds, strict=True)
        ]

    start = [jnp.zeros_like(x) for x in v], [bound.violated for bound in bounds]
    acceleration, _ = jax.lax.fori_loop(0, SOLVES, attempt, start)

    # (M + h B) dv = h M acceleration, since M acceleration is the sum of all forces: dv = h (acceleration - rest)
    h = arm.timestep
    implicit = [[*row[:-1], add(row[-1], h * link.damping)] for row, link in zip(matrix, arm.links, strict=False)]
    braked = [add(x, h * link.damping) for x, link in zip(heavy, arm.links[HINGES:], strict=True)]
    drags = [mul(h * link.damping, a) for link, a in zip(arm.links, acceleration, strict=True)]
    rest = _solve_with_fingers(implicit, coupling, braked, drags)
    v = [speed + h * (a - r) for speed, a, r in zip(v, acceleration, rest, strict=True)]
    return Motion([x + h * speed for x, speed in zip(q, v, strict=True)], v)


def steps(motion: Motion, target: Vector, grip: Array, torque_scale: Array) -> Motion:
    """Return the motion after the physics steps of a control period; see `step`."""
    arm = constants.arm()

    def physics_step(_: int, motion: Motion) -> Motion:
        return step(arm, motion, target, grip, torque_scale)

    return jax.lax.fori_loop(0, arm.substeps, physics_step, motion)


@jax.jit
def control_step(q: Array, v: Array, target: Array, grip: Array, torque_scale: Array) -> tuple[Array, Array]:
    """Return joint values and speeds one control step later. Jitted, so that it is traced once per shape.

    Args:
        q, v: float[9, ...], the trailing axes are the batch; rad and rad/s, m and m/s.
        target: float[3, ...], m.
        grip: float[...], 1 = close; clipped to [-1, 1].
        torque_scale: float[], `constants.torque_scale`.
    """
    after = steps(Motion(list(q), list(v)), list(target), jnp.clip(grip, -1.0, 1.0), torque_scale)
    return jnp.stack(after.q), jnp.stack(after.v)
