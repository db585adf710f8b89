"""A student: soft actor-critic with a decaying reward bonus for agreeing with a teacher.

The bonus of a step is w rho, where rho in (0, 1] is the teacher's density of the action taken, relative to its
peak, and w decays to 0 over training. rho is computed during acting and stored; w is the weight at the update. The
teacher is a collective network with its window of the last steps (the published collective-learning pipeline,
argator18/A-transformer-based-collective-learning-framework-for-scalable-knowledge-accumulation-and-transfer). Without a
teacher a student is bit-identical to SAC. Losses first, then the algorithm.
"""

import dataclasses
import functools
import json
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from envs_jax.base import Array, EnvSpec, TimeStep, pytree
from envs_jax.progress import Progress, total
from jaxrl.algos.base import AlgoState, Mode, Trajectory, setting
from jaxrl.algos.collective.algorithm import Collective
from jaxrl.algos.collective.networks import Carry
from jaxrl.algos.multi_stage import MultiStage, Recordings, Sources, read_resolved
from jaxrl.algos.sac import Sac, SacParameters
from jaxrl.common.shapes import Float32, assert_equal_shape, assert_rank
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.rl import replay
from jaxrl.rl.replay import Replay

# Layout letters besides T, B, A, S: N samples, n action dims.

GOLDEN = 2654435769  # 2^32 divided by the golden ratio
# Settings that determine the teacher's networks.
TEACHER_SETTINGS = (
    "resolved_inputs", "state_entries", "context_length", "code_size", "embedding_size", "feedforward_size",
    "num_heads", "num_layers", "hidden_size", "depth",
)  # fmt: skip


def agreement(
    action: Float32[Array, "*batch n"], mean: Float32[Array, "*batch n"], deviation: Float32[Array, "*batch n"]
) -> Float32[Array, "*batch"]:
    """Return rho = exp(-1/2 sum_i ((a_i - mu_i) / sigma_i)^2), which is 1 at the teacher's mean action."""
    assert_equal_shape([action, mean, deviation])
    return jnp.exp(-0.5 * jnp.sum(jnp.square((action - mean) / deviation), axis=-1))


def teacher_weight_schedule(step: Float32[Array, ""], constant_until: float, end: float) -> Float32[Array, ""]:
    """Return the weight of the bonus at an environment step: 1 until `constant_until`, then linear to 0 at `end`."""
    assert_rank(step, 0)
    return jnp.clip((end - step) / (end - constant_until), 0.0, 1.0)


@pytree
class StudentParameters(SacParameters):
    """SAC's parameters, and the teacher's, which are fixed; () without one."""

    teacher: Params


@dataclasses.dataclass(frozen=True)
class Student(Sac, MultiStage):
    """Soft actor-critic with a bonus for agreeing with a teacher."""

    teacher: str = setting("", "run of collective used as the teacher; empty = none (plain SAC)")
    resolved_inputs: str = setting("", "the teacher's networks, as JSON; filled in from its run", flag=False)
    alpha_lr: float = setting(3e-4, "learning rate of the temperatures (Adam); 0 = constant", between=(0, 10))
    target_update_period: int = setting(2, "critic updates per update of the target networks", between=(1, 1e9))
    teacher_weight: float = setting(1.0, "initial reward bonus for full agreement with the teacher", between=(0, 1e6))
    teacher_constant_steps: int = setting(
        4000, "environment steps after random_steps for which the bonus stays constant", between=(0, 2**24 - 1)
    )
    teacher_until_step: int = setting(100_000, "environment step from which the bonus is 0", between=(0, 2**24 - 1))
    teacher_min_std: float = setting(
        0.1, "lower bound of the teacher's standard deviation in the bonus (original: 1e-4)", between=(1e-6, 1e3)
    )
    guide_steps: int = setting(
        0, "let the teacher play the first steps of each episode (jump start, arXiv 2204.02372): a number drawn for "
        "each episode up to this limit, which falls to 0 as the bonus does; 0 = none",
        between=(0, 2**24),
    )  # fmt: skip

    sources: ClassVar[tuple[str, ...]] = ("teacher",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher_algo is None:
            if self.teacher_weight or self.guide_steps:
                raise ValueError(
                    "a student needs a teacher: name a run of collective with --teacher RUN, or train without one "
                    "with --teacher_weight 0 --guide_steps 0"
                )
            return
        if not self.random_steps + self.teacher_constant_steps < self.teacher_until_step < 2**24:
            raise ValueError(
                f"teacher_until_step must lie above random_steps + teacher_constant_steps "
                f"({self.random_steps + self.teacher_constant_steps:,}) and "
                f"below {2**24:,}, not be {self.teacher_until_step:,}"
            )

    @classmethod
    def resolve_inputs(
        cls, spec: EnvSpec, settings: dict[str, Any], sources: Sources, recordings: Recordings
    ) -> dict[str, Any]:
        """Return the settings, with the settings of the teacher's networks in `resolved_inputs`."""
        del recordings
        teachers = sources["teacher"]
        if len(teachers) > 1:
            raise ValueError(
                f"a student has one teacher, but --teacher names {len(teachers)}: name one run of collective"
            )
        settings = settings | {"resolved_inputs": ""}  # from another teacher, in the configuration of an earlier run
        for source in teachers:
            if not isinstance(source.algo, Collective):
                kind = type(source.algo).__name__.lower()
                raise ValueError(f"{source.run} was trained with {kind}: a teacher must be a run of collective")
            source.check(spec)
            settings = settings | {
                "resolved_inputs": json.dumps({name: source.settings[name] for name in TEACHER_SETTINGS})
            }
        return settings

    @functools.cached_property
    def teacher_algo(self) -> Collective | None:
        """The teacher's algorithm; its minibatches are as small as allowed."""
        if not self.resolved_inputs:
            return None
        settings = read_resolved(self.resolved_inputs, TEACHER_SETTINGS)
        settings["state_entries"] = tuple(settings.get("state_entries", ()))
        settings |= dict.fromkeys(("batch_size", "transformer_batch"), self.layout.shards)
        return Collective(self.spec, self.layout, **settings)

    # Replay contents

    @property
    def action_shapes(self) -> Any:
        """SAC's shape; with a teacher also the shape of its agreement "rho"."""
        shape = super().action_shapes
        rho = jax.ShapeDtypeStruct(shape.shape[:1], jnp.float32)
        return shape if self.teacher_algo is None else {"action": shape, "rho": rho}

    def stored_action(self, trajectory: Trajectory) -> Any:
        action = super().stored_action(trajectory)
        return action if self.teacher_algo is None else {"action": action, **trajectory.extras}

    def gather(self, buffer: Replay, index: Array) -> dict[str, Any]:
        """Return SAC's batch; with a teacher also "rho" of every action in the window, [S, m, n_step, A]."""
        batch = super().gather(buffer, index)
        if self.teacher_algo is None:
            return batch
        gather_window = jax.vmap(functools.partial(replay.gather_window, steps=self.n_step))
        return batch | {"rho": gather_window(buffer.action["rho"], index)}

    def update(
        self, params: Any, batch: dict[str, Any], update_index: Array, progress: Progress
    ) -> tuple[Any, dict[str, Array]]:
        if self.teacher_algo is not None:
            weight = self.teacher_weight * self.help_left(progress)

            def reward(sample: dict[str, Array]) -> Array:
                return sample["reward"] + weight * sample["rho"]

            rewards = self.layout.apply(reward, {name: batch[name] for name in ("reward", "rho")})
            batch = batch | {"action": batch["action"]["action"], "reward": rewards}
        return super().update(params, batch, update_index, progress)

    # The teacher's part

    def help_left(self, progress: Progress) -> Array:
        """Return which share of the bonus and of `guide_steps` is left, float32[]."""
        constant_until = self.random_steps + self.teacher_constant_steps
        return teacher_weight_schedule(total(progress.env_steps), constant_until, self.teacher_until_step)

    def teacher_acts(self, carry: Carry, progress: Progress) -> Array:
        """Return whether the teacher acts, bool[B].

        An episode's limit is a share of `guide_steps`, from the multiples of the golden ratio, which spread evenly.
        """
        drawn = (carry.episode.astype(jnp.uint32) * jnp.uint32(GOLDEN)).astype(jnp.float32) * 2.0**-32
        return carry.step.astype(jnp.float32) < self.guide_steps * self.help_left(progress) * drawn

    # Protocol

    def init(self, key: Key, inputs: Any) -> AlgoState:
        """Return a fresh student of the one teacher in `inputs["teacher"]` (its weights).

        Without inputs the teacher is untrained, which is enough for the shapes of the state.
        """
        state = super().init(key, None)
        teacher: Any = ()
        if self.teacher_algo is not None:
            teacher_weights = (inputs or {}).get("teacher")
            if teacher_weights:
                (networks,) = teacher_weights
            else:
                networks = self.teacher_algo.model.init(jax.random.fold_in(key, 0x7EAC))
            teacher = {name: networks[name] for name in ("encoder", "actor")}
        return AlgoState(StudentParameters(**vars(state.replicated), teacher=teacher), state.sharded)

    def policy(self, state: AlgoState) -> PolicyParams:
        return {"actor": super().policy(state), "teacher": state.replicated.teacher}

    def init_carry(self, policy_params: PolicyParams, timestep: TimeStep, indices: Array) -> Any:
        return () if self.teacher_algo is None else self.teacher_algo.init_carry(policy_params, timestep, indices)

    def act(
        self, policy_params: PolicyParams, carry: Any, timestep: TimeStep, keys: Key, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """Act as SAC; in training also compute the teacher's agreement, and let it play the first `guide_steps`.

        Evaluation leaves the carry, the teacher's window, as it is.
        """
        action, _, extras = super().act(policy_params["actor"], (), timestep, keys, progress, mode)
        teacher = self.teacher_algo
        if teacher is None or mode != "explore":
            return action, carry, extras
        carry = teacher.observe(carry, timestep)
        student_action = self.actions.normalize(action)[:, 0]
        helps = self.teacher_weight or self.guide_steps
        teacher_is_used = total(progress.env_steps) < (self.teacher_until_step if helps else 0)
        mean, log_std = jax.lax.cond(
            teacher_is_used,
            lambda: teacher.model.action_distribution(policy_params["teacher"], carry.window),
            lambda: (student_action, jnp.zeros_like(student_action)),
        )
        mean = jnp.tanh(mean)
        if self.guide_steps:
            student_action = jnp.where(self.teacher_acts(carry, progress)[:, None], mean, student_action)
            action = self.actions.denormalize(student_action[:, None])
        rho = agreement(student_action, mean, jnp.maximum(jnp.exp(log_std), self.teacher_min_std))
        extras = {"rho": jnp.where(teacher_is_used, rho, 0.0)[:, None]}
        return action, dataclasses.replace(carry, action=student_action), extras
