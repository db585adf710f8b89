"""Numbers of the arm, read from the data file of the package (MIT licence, see its "source" and "licence")."""

import dataclasses
import functools
import json
from importlib import resources
from typing import Any

import numpy as np

WELDS = {"v3": ("torquescale_v3", "reset"), "v2": ("torquescale_v2", "reset_v2")}  # Meta-World's; keys of the data
JOINTS = 9
HINGES = 7
_RIGHT_ANGLE = 1e-12  # entries of rotations closer to a whole number are rounded


@functools.cache
def data() -> dict[str, Any]:
    """Return the data file, parsed."""
    return json.loads(resources.files(__package__).joinpath("sawyer_reach_constants.json").read_text())


@dataclasses.dataclass(frozen=True)
class Link:
    """One link: `rotation` [3, 3] and `shift` [3] lead from its frame at joint value 0 to its parent's.

    `inertia` [3, 3] is about the centre of mass `com` [3]; SI units. Limits, damping, armature and inverse weight
    belong to its joint.
    """

    rotation: np.ndarray
    shift: np.ndarray
    mass: float
    com: np.ndarray
    inertia: np.ndarray
    low: float
    high: float
    damping: float
    armature: float
    inverse_weight: float


@dataclasses.dataclass(frozen=True)
class Softness:
    """Softness of a constraint: stiffness and damping of its reference, and its impedance over the violation."""

    time: float
    ratio: float
    least: float
    most: float
    width: float

    @property
    def stiffness(self) -> float:
        return 1.0 / (self.most * self.time * self.ratio) ** 2

    @property
    def damping(self) -> float:
        return 2.0 / (self.most * self.time)


@dataclasses.dataclass(frozen=True)
class Arm:
    """Seven hinges (about local z), then the right and the left finger (slides along local y, on the last hinge)."""

    links: tuple[Link, ...]  # nine, each on the one before it, but for the fingers
    hand_rotation: np.ndarray  # frame of the hand in the last hinge's link
    hand_shift: np.ndarray
    hand_weights: tuple[float, float]  # inverse weights of the hand, of translation and rotation
    weld: Softness  # between hand and target
    limit: Softness  # joint limits
    gain: float  # finger servos
    site: float  # offset of the fingertips from the hand along its x axis, m
    timestep: float  # physics, s
    substeps: int  # physics steps of a control period
    gravity: float  # downwards, m/s^2


@dataclasses.dataclass(frozen=True)
class Reset:
    """The arm after its settling, float64.

    Attributes:
        target: [3], m.
        q, v: [9], joint values and speeds.
        tool_before: [3], tool centre one physics step earlier, m.
        puck_turn: [4], quaternion x, y, z, w of the puck, which the settling of the arm disturbs.
    """

    target: np.ndarray
    q: np.ndarray
    v: np.ndarray
    tool_before: np.ndarray
    puck_turn: np.ndarray


def _rotation(rows: Any) -> np.ndarray:
    matrix = np.array(rows, np.float64)
    whole = np.round(matrix)
    return np.where(np.abs(matrix - whole) < _RIGHT_ANGLE, whole, matrix)


def _softness(entry: dict[str, Any]) -> Softness:
    time, ratio = entry["solref"]
    least, most, width, midpoint, power = entry["solimp"]
    assert (ratio, midpoint, power) == (1.0, 0.5, 2.0), "the formulas are written for these"
    return Softness(time, ratio, least, most, width)


@functools.cache
def arm() -> Arm:
    """Build the arm from the data file."""
    numbers = data()
    links = tuple(
        Link(
            rotation=_rotation(link["parent_to_link_rotation"]),
            shift=np.array(link["parent_to_link_translation"]),
            mass=link["mass"],
            com=np.array(link["com"]),
            inertia=np.array(link["inertia_about_com"]),
            low=link["joint_range"][0],
            high=link["joint_range"][1],
            damping=link["damping"],
            armature=link["armature"],
            inverse_weight=link["dof_invweight0"],
        )
        for link in numbers["links"]
    )
    assert [link["parent"] for link in numbers["links"]] == [-1, 0, 1, 2, 3, 4, 5, 6, 6]
    hand = numbers["hand"]
    return Arm(
        links=links,
        hand_rotation=_rotation(hand["rotation_in_link"]),
        hand_shift=np.array(hand["translation_in_link"]),
        hand_weights=tuple(hand["body_invweight0"]),
        weld=_softness(numbers["weld"]),
        limit=_softness(numbers["joint_limit"]),
        gain=numbers["actuator"]["kp"],
        site=numbers["finger_site_offset_in_claw"][0],
        timestep=numbers["timestep"],
        substeps=numbers["frame_skip"],
        gravity=-numbers["gravity"][2],
    )


def torque_scale(weld: str) -> float:
    """Return the weight of the weld's rotation."""
    return data()["weld"][WELDS[weld][0]]


@functools.cache
def reset(weld: str = "v3") -> Reset:
    """Return the state in which all episodes begin, with the arm still moving."""
    entry = data()[WELDS[weld][1]]
    names = (
        "mocap",
        "qpos_arm_and_fingers",
        "qvel_arm_and_fingers",
        "tcp_before_last_physics_step",
        "puck_quat_xyzw_in_first_observation",
    )
    return Reset(*(np.array(entry[name], np.float64) for name in names))
