"""Reach in float64 NumPy, independent of `envs_jax.reach`: 3 x 3 matrices in the world frame, plain solves.

The mass matrix is a sum over links through their Jacobians, the bias comes from accelerations of centres of mass, the
active limits are iterated to a fixed point. It shares nothing with the JAX side but the data file.
E arms are stepped at once (leading axis); E = 1 is how the original system steps.
"""

import dataclasses
import functools
import json
from importlib import resources
from typing import Any

import numpy as np

MOST_SEARCHES = 30
SINK_MM = (0, -0.132, -0.299, -0.423, -0.499, -0.543, -0.565, -0.577, -0.583, -0.586, -0.588, -0.589)
RADIUS = 0.05
TARGET_ROTATION = np.array([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 0.0]])


@functools.cache
def constants() -> dict[str, Any]:
    """Return the data file."""
    return json.loads(resources.files("envs_jax.reach").joinpath("sawyer_reach_constants.json").read_text())


def _column(name: str) -> np.ndarray:
    return np.array([link[name] for link in constants()["links"]], np.float64)


@dataclasses.dataclass(frozen=True)
class Frames:
    """Every link's rotation [E, 9, 3, 3] and origin [E, 9, 3], the hand's [E, 3, 3] and [E, 3], in the world."""

    rotation: np.ndarray
    origin: np.ndarray
    hand_rotation: np.ndarray
    hand: np.ndarray


def frames(q: np.ndarray) -> Frames:
    """Compute the frames of joint values float64[E, 9]."""
    count = len(q)
    rotation = np.zeros((count, 9, 3, 3))
    origin = np.zeros((count, 9, 3))
    for i, link in enumerate(constants()["links"]):
        if link["parent"] < 0:
            above = np.broadcast_to(np.eye(3), (count, 3, 3))
            base = np.zeros((count, 3))
        else:
            above = rotation[:, link["parent"]]
            base = origin[:, link["parent"]]
        fixed = above @ np.array(link["parent_to_link_rotation"])
        place = base + above @ np.array(link["parent_to_link_translation"])
        if link["type"] == "hinge":
            c = np.cos(q[:, i])
            s = np.sin(q[:, i])
            turn = np.zeros((count, 3, 3))
            turn[:, 0, 0] = turn[:, 1, 1] = c
            turn[:, 1, 0], turn[:, 0, 1], turn[:, 2, 2] = s, -s, 1.0
            rotation[:, i], origin[:, i] = fixed @ turn, place
        else:
            rotation[:, i], origin[:, i] = fixed, place + q[:, i, None] * fixed[:, :, 1]
    hand = constants()["hand"]
    last = rotation[:, hand["link"]]
    return Frames(
        rotation,
        origin,
        last @ np.array(hand["rotation_in_link"]),
        origin[:, hand["link"]] + last @ np.array(hand["translation_in_link"]),
    )


def tool_centre(q: np.ndarray) -> np.ndarray:
    """float64[E, 3]: mean of the two fingertips, each at its finger's own offset."""
    links = frames(q)
    offset = np.array(constants()["finger_site_offset_in_claw"], np.float64)
    return np.mean([links.origin[:, i] + links.rotation[:, i] @ offset for i in (7, 8)], axis=0)


def opening(q: np.ndarray) -> np.ndarray:
    """float64[E], from the distance of the finger bodies."""
    links = frames(q)
    return np.clip(np.linalg.norm(links.origin[:, 7] - links.origin[:, 8], axis=-1) / 0.1, 0.0, 1.0)


def _moves(i: int) -> list[int]:
    """Return the joints that move link i."""
    chain = []
    while i >= 0:
        chain.append(i)
        i = constants()["links"][i]["parent"]
    return chain[::-1]


def mass_and_bias(q: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mass matrix float64[E, 9, 9] with armature, and bias float64[E, 9]."""
    frame = frames(q)
    links = constants()["links"]
    count = len(q)
    matrix = np.zeros((count, 9, 9))
    forces = np.zeros((count, 9))
    down = np.array(constants()["gravity"])
    # angular velocity and acceleration, and acceleration of the origin, of every link with all joints coasting
    spin, turning, rising = (np.zeros((count, 9, 3)) for _ in range(3))
    for i, link in enumerate(links):
        parent = link["parent"]
        if parent >= 0:
            w = spin[:, parent]
            a = turning[:, parent]
            base = rising[:, parent]
            arm = frame.origin[:, i] - frame.origin[:, parent]
        else:
            w = a = base = np.zeros((count, 3))
            arm = frame.origin[:, i]
        rising[:, i] = base + np.cross(a, arm) + np.cross(w, np.cross(w, arm))
        if link["type"] == "hinge":
            axis = v[:, i, None] * frame.rotation[:, i, :, 2]
            spin[:, i], turning[:, i] = w + axis, a + np.cross(w, axis)
        else:
            spin[:, i], turning[:, i] = w, a
            rising[:, i] += 2 * np.cross(w, v[:, i, None] * frame.rotation[:, i, :, 1])
    for i, link in enumerate(links):
        turned = frame.rotation[:, i]
        arm = turned @ np.array(link["com"])
        centre = frame.origin[:, i] + arm
        inertia = turned @ np.array(link["inertia_about_com"]) @ turned.swapaxes(1, 2)
        linear = np.zeros((count, 3, 9))
        angular = np.zeros((count, 3, 9))
        for j in _moves(i):
            if links[j]["type"] == "hinge":
                axis = frame.rotation[:, j, :, 2]
                linear[:, :, j], angular[:, :, j] = np.cross(axis, centre - frame.origin[:, j]), axis
            else:
                linear[:, :, j] = frame.rotation[:, j, :, 1]
        matrix += link["mass"] * linear.swapaxes(1, 2) @ linear + angular.swapaxes(1, 2) @ inertia @ angular
        w = spin[:, i]
        a = turning[:, i]
        pull = link["mass"] * (rising[:, i] + np.cross(a, arm) + np.cross(w, np.cross(w, arm)) - down)
        momentum = np.einsum("eij,ej->ei", inertia, w)
        couple = np.einsum("eij,ej->ei", inertia, a) + np.cross(w, momentum)
        forces += np.einsum("eij,ei->ej", linear, pull) + np.einsum("eij,ei->ej", angular, couple)
    return matrix + np.diag(_column("armature")), forces


def _softness(violation: np.ndarray, entry: dict[str, Any]) -> tuple[np.ndarray, float, float]:
    """Impedance, stiffness and damping."""
    time, ratio = entry["solref"]
    lowest, highest, width = entry["solimp"][:3]
    x = np.minimum(violation / width, 1.0)
    y = np.where(x <= 0.5, 2 * x**2, 1 - 2 * (1 - x) ** 2)
    return lowest + y * (highest - lowest), 1 / (highest**2 * time**2 * ratio**2), 2 / (highest * time)


def _quaternion(rotation: np.ndarray) -> np.ndarray:
    """float64[E, 4] w first, w >= 0: the eigenvector of a symmetric 4 x 4 matrix (Bar-Itzhack)."""
    r = rotation
    k = np.zeros((len(r), 4, 4))
    for i in range(3):
        for j in range(3):
            k[:, i + 1, j + 1] = r[:, i, j] + r[:, j, i]
    trace = np.trace(r, axis1=1, axis2=2)
    k[:, 1:, 1:] -= trace[:, None, None] * np.eye(3)
    k[:, 0, 0] = trace
    across = np.stack([r[:, 2, 1] - r[:, 1, 2], r[:, 0, 2] - r[:, 2, 0], r[:, 1, 0] - r[:, 0, 1]], axis=-1)
    k[:, 0, 1:] = k[:, 1:, 0] = across
    largest = np.linalg.eigh(k)[1][:, :, -1]
    return largest * np.where(largest[:, :1] < 0, -1.0, 1.0)


def physics_step(
    q: np.ndarray, v: np.ndarray, target: np.ndarray, grip: np.ndarray, torque_scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """q, v float64[E, 9], target [E, 3], grip [E] -> q, v one physics step later."""
    frame = frames(q)
    count = len(q)
    h = constants()["timestep"]
    matrix, drag = mass_and_bias(q, v)
    damping = _column("damping")
    smooth = -damping * v - drag
    gain, (low, high) = constants()["actuator"]["kp"], constants()["actuator"]["ctrl_range"]
    smooth[:, 7] += gain * (np.clip(grip, low, high) - q[:, 7])
    smooth[:, 8] += gain * (np.clip(-grip, low, high) - q[:, 8])

    away = _quaternion(frame.hand_rotation.swapaxes(1, 2) @ TARGET_ROTATION)
    error = np.concatenate([target - frame.hand, torque_scale * away[:, 1:]], axis=1)
    jacobian = np.zeros((count, 6, 9))
    for j in range(7):
        axis = frame.rotation[:, j, :, 2]
        jacobian[:, :3, j] = -np.cross(axis, frame.hand - frame.origin[:, j])
        turn = -np.einsum("eji,ej->ei", frame.hand_rotation, axis)
        jacobian[:, 3:, j] = torque_scale / 2 * (away[:, :1] * turn + np.cross(turn, away[:, 1:]))
    imp, stiffness, resistance = _softness(np.linalg.norm(error, axis=1), constants()["weld"])
    inverse = np.repeat(constants()["hand"]["body_invweight0"], 3)
    weight = (imp / (1 - imp))[:, None] / inverse
    weld_acceleration = -resistance * np.einsum("eij,ej->ei", jacobian, v) - stiffness * imp[:, None] * error

    low_q, high_q = _column("joint_range").T
    sign = np.where(low_q - q > q - high_q, 1.0, -1.0)
    depth = np.maximum(low_q - q, q - high_q)
    limit_imp, stiffness, resistance = _softness(np.maximum(depth, 0), constants()["joint_limit"])
    limit_weight = limit_imp / ((1 - limit_imp) * _column("dof_invweight0"))
    limit_wanted = -resistance * sign * v + stiffness * limit_imp * depth
    violated = depth > 0
    active = violated
    held = matrix + jacobian.swapaxes(1, 2) @ (weight[:, :, None] * jacobian)
    pushed = smooth + np.einsum("eij,ei->ej", jacobian, weight * weld_acceleration)
    for _ in range(MOST_SEARCHES):
        on = np.where(active, limit_weight, 0.0)
        whole = held + on[:, :, None] * np.eye(9)
        acceleration = np.linalg.solve(whole, (pushed + on * sign * limit_wanted)[:, :, None])[:, :, 0]
        before = active
        active = violated & (sign * acceleration < limit_wanted)
        if np.array_equal(active, before):
            break
    else:
        raise RuntimeError("the active limits do not settle")
    missing = weld_acceleration - np.einsum("eij,ej->ei", jacobian, acceleration)
    force = np.einsum("eij,ei->ej", jacobian, weight * missing)
    force += np.where(violated, sign * limit_weight * np.maximum(0.0, limit_wanted - sign * acceleration), 0.0)
    implicit = matrix + h * np.diag(damping)
    v = v + h * np.linalg.solve(implicit, (smooth + force)[:, :, None])[:, :, 0]
    return q + h * v, v


def move_target(target: np.ndarray, action: np.ndarray) -> np.ndarray:
    """float64[E, 3]; the increment has the type of the action."""
    table = constants()
    step = np.clip(action, -1, 1)[:, :3] * action.dtype.type(table["action_scale"])
    return np.clip(target + step, table["mocap_low"], table["mocap_high"])


def reward_v2(tool: np.ndarray, point: np.ndarray, radius: float = RADIUS) -> np.ndarray:
    """float64[...] of places [..., 3]."""
    distance = np.linalg.norm(tool - point, axis=-1)
    margin = np.linalg.norm(np.array([0, 0.6, 0.2]) - point, axis=-1)
    excess = (distance - radius) / margin
    return np.where(distance <= radius, 10.0, 10 / ((excess * np.sqrt(1 / 0.1 - 1)) ** 2 + 1))


def reward_v1(tool: np.ndarray, point: np.ndarray, tool_before: np.ndarray) -> np.ndarray:
    """float64[...] of places [..., 3]; `tool_before` is the tool centre one physics step before the reset's end."""
    distance = np.linalg.norm(tool - point, axis=-1)
    most = np.linalg.norm(tool_before - point, axis=-1)
    close_bonus = 1000 * (np.exp(-(distance**2) / 0.01) + np.exp(-(distance**2) / 0.001))
    return np.maximum(0.0, 1000 * (most - distance) + close_bonus)


@dataclasses.dataclass
class Arms:
    """E episodes of reach: state and observation.

    Args:
        puck, goal: float64[E, 3].
        weld: "v3" or "v2".
        reward: "v2", "v1" or "sparse".
        radius: of success, m.
    """

    puck: np.ndarray
    goal: np.ndarray
    weld: str = "v3"
    reward: str = "v2"
    radius: float = RADIUS

    def __post_init__(self) -> None:
        entry = constants()["reset" if self.weld == "v3" else "reset_v2"]
        count = len(self.goal)
        self.torque_scale = constants()["weld"][f"torquescale_{self.weld}"]
        self.q, self.v, self.target = (
            np.tile(np.array(entry[name], np.float64), (count, 1))
            for name in ("qpos_arm_and_fingers", "qvel_arm_and_fingers", "mocap")
        )
        self.tool_before = np.array(entry["tcp_before_last_physics_step"])
        self.t = 0
        self._last = self._frame()

    def _frame(self) -> np.ndarray:
        """[E, 18]: the observed frame of this step."""
        puck = self.puck + np.array([0, 0, SINK_MM[min(self.t, len(SINK_MM) - 1)] / 1000])
        entry = constants()["reset" if self.weld == "v3" else "reset_v2"]
        turn = [0.0, 0.0, 0.0, 1.0] if self.t else entry["puck_quat_xyzw_in_first_observation"]
        rest = np.tile([*turn, *[0.0] * 7], (len(self.q), 1))
        return np.concatenate([frames(self.q).hand, opening(self.q)[:, None], puck, rest], axis=1)

    def observe(self) -> np.ndarray:
        """[E, 39]"""
        observation = np.concatenate([self._frame(), self._last, self.goal], axis=1)
        low, high = np.array(constants()["hand_obs_low"]), np.array(constants()["hand_obs_high"])
        for start in (0, 18):
            observation[:, start : start + 3] = np.clip(observation[:, start : start + 3], low, high)
        return observation

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reward [E] and success bool[E] of actions [E, 4]."""
        self._last = self._frame()
        self.target = move_target(self.target, action)
        for _ in range(constants()["frame_skip"]):
            self.q, self.v = physics_step(self.q, self.v, self.target, action[:, 3], self.torque_scale)
        self.t += 1
        tool = tool_centre(self.q)
        success = np.linalg.norm(tool - self.goal, axis=-1) <= self.radius
        if self.reward == "sparse":
            return success.astype(np.float64), success
        if self.reward == "v1":
            return reward_v1(tool, self.goal, self.tool_before), success
        return reward_v2(tool, self.goal, self.radius), success
