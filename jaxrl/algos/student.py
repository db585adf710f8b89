"""A student: soft actor-critic that is paid for doing what a teacher would do, less and less.

A step pays w rho more than its reward, where rho in (0, 1] is the teacher's density of the action taken, relative to
its peak, and w falls to 0 over training. rho is found in acting and stored with the step; w is that of the update. The
teacher is an actor of SAC with networks like the student's own, given through `inputs`; for another kind of teacher,
override `advice`. Losses on top, the algorithm below.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array, TimeStep, pytree
from jaxrl.algos.base import AlgoState, Mode, Progress, Trajectory, setting, total
from jaxrl.algos.sac import Sac, SacParameters

# Layout letters besides T, B, A, S: N samples, n numbers of an action.


def agreement(action: Array, mean: Array, deviation: Array) -> Array:
    """Rho, exp(-1/2 sum_i ((a_i - mu_i) / sigma_i)^2), float32[...] of [..., n]; 1 at the teacher's own action."""
    return jnp.exp(-0.5 * jnp.sum(jnp.square((action - mean) / deviation), axis=-1))


def share_of_help(step: Array, constant_until: float, end: float) -> Array:
    """What is left of the help at an environment step: all, from `constant_until` on less and less, none at `end`."""
    return jnp.clip(1 - (step - constant_until) / (end - constant_until), 0.0, 1.0)


@pytree
class StudentParameters(SacParameters):
    """Those of SAC, and the teacher's, which stay as they are."""

    teacher: Any


@dataclasses.dataclass(frozen=True)
class Student(Sac):
    """Soft actor-critic with a teacher's help."""

    alpha_lr: float = setting(3e-4, "learning rate of the temperatures (Adam); 0 = they stay as they are")
    target_freq: int = setting(2, "updates per step of the target networks")
    help_weight: float = setting(1.0, "what full agreement with the teacher pays at the start")
    help_constant: int = setting(4000, "environment steps behind init_steps during which it pays as much")
    help_until: int = setting(100_000, "environment step from which on the teacher is not asked any more")
    help_deviation: float = setting(0.1, "smallest standard deviation that the teacher is granted (original: 1e-4)")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(("help_weight", "help_constant"))
        self._check(("help_deviation",), above=0)
        if self.n_step != 1:
            raise ValueError(f"the teacher's help is for single steps: n_step must be 1, not {self.n_step}")
        if not self.init_steps + self.help_constant < self.help_until < 2**24:
            raise ValueError(
                f"help_until must lie above init_steps + help_constant ({self.init_steps + self.help_constant:,}) and "
                f"below {2**24:,}, not be {self.help_until:,}"
            )

    def advice(self, teacher: Any, timestep: TimeStep) -> tuple[Array, Array]:
        """What the teacher does in time steps [B]: mean in [-1, 1] and deviation, each float32[B, A, n]."""
        mean, log_std = self.gaussian(teacher, timestep.observation)
        return jnp.tanh(mean), jnp.maximum(jnp.exp(log_std), self.help_deviation)

    # What the replay holds

    @property
    def _answer(self) -> Any:
        """Actions, and how far the teacher agrees."""
        return {"action": super()._answer, "rho": jax.ShapeDtypeStruct((self.spec.num_agents,), jnp.float32)}

    def _answers(self, trajectory: Trajectory) -> Any:
        return {"action": super()._answers(trajectory), "rho": trajectory.extras["rho"]}

    def _prepared(self, batch: dict[str, Any], env_steps: Array) -> dict[str, Any]:
        """The help becomes part of the reward."""
        step = self.layout.alone(
            lambda steps: self.help_weight * share_of_help(steps, self.init_steps + self.help_constant, self.help_until)
        )
        weight, answer = step(env_steps), batch["answer"]
        paid = self.layout.apply(
            lambda sample: sample["reward"] + weight * sample["rho"][:, None],
            {"reward": batch["reward"], "rho": answer["rho"]},
        )
        return batch | {"answer": answer["action"], "reward": paid}

    # Protocol

    def init(self, key: Array, inputs: Any) -> AlgoState:
        """A fresh student of `inputs["teacher"]` (parameters of an actor), or all that `weights` gives.

        Without inputs the teacher knows nothing, which is enough to learn the shapes of the state.
        """
        key, key_teacher = jax.random.split(key)
        state = super().init(key, inputs if inputs and "actor" in inputs else None)
        teacher = inputs["teacher"] if inputs else super().init(key_teacher, None).replicated.actor
        own = {field.name: getattr(state.replicated, field.name) for field in dataclasses.fields(SacParameters)}
        return AlgoState(StudentParameters(**own, teacher=teacher), state.split)

    def weights(self, state: AlgoState) -> Any:
        return super().weights(state) | {"teacher": state.replicated.teacher}

    def policy(self, state: AlgoState) -> Any:
        """Parameters of the actor and of the teacher."""
        return {"actor": state.replicated.actor, "teacher": state.replicated.teacher}

    def act(
        self, policy: Any, actor: Any, timestep: TimeStep, keys: Array, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """As SAC acts; in training the teacher is asked what it thinks of it."""
        action, actor, extras = super().act(policy["actor"], actor, timestep, keys, progress, mode)
        if mode != "explore":
            return action, actor, extras
        own = self._inward(action)
        rho = jax.lax.cond(
            total(progress.env_steps) < self.help_until,
            lambda: agreement(own, *self.advice(policy["teacher"], timestep)),
            lambda: jnp.zeros(own.shape[:-1]),
        )
        return action, actor, {"rho": rho}
