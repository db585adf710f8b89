"""The collective network: what the workers of several tasks can do, in one policy that is told the task by a code.

Workers (SAC, one for each task) label what random actions, the learner itself and they themselves come across, so that
the learner is taught on states of its own (DAgger, Ross et al. 2011, arXiv 1011.0686). A transformer makes a task code
of the last steps (`transformer`); actor and critics of code and state are then fitted to the labels.
Stages, losses and sizes are those of the published collective-learning pipeline
(argator18/A-transformer-based-collective-learning-framework-for-scalable-knowledge-accumulation-and-transfer), but that

* value labels mean Q of the step itself, by the workers' critics instead of their targets;
* one learner acts in all tasks and becomes the final actor, where the original has a temporary one for each task;
* the transformer learns from the same labelled set as the actor, not from a set of the workers' training;
* an environment begins at a drawn task and goal before it takes them in order (with --goals order of reach);
* codes are computed once when the transformer is frozen instead of at every update.

Labelled sets from elsewhere may take the place of workers, or stand beside what theirs collect. Losses on top,
the algorithm below.
"""

import dataclasses
import json
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from envs_jax.base import Array, Box, EnvSpec, TimeStep, pytree
from jaxrl.algos.base import (
    RATE,
    UNIT,
    Algorithm,
    AlgoState,
    Mode,
    Phase,
    Progress,
    Source,
    Trajectory,
    read_adopted,
    setting,
    total,
)  # fmt: skip
from jaxrl.algos.collective import dataset, transformer, world_model
from jaxrl.algos.collective.transformer import TrajectoryTransformer, Views, Window
from jaxrl.algos.collective.world_model import WorldModel
from jaxrl.algos.sac import Sac
from jaxrl.nn import distributions, networks, optimizers
from jaxrl.rl import replay
from jaxrl.rl.replay import Replay
from jaxrl.runtime.data_parallel import Layout

# Layout letters besides T, B, S: K tasks and workers, N samples, n numbers of an action, c of a code, s of a state,
# R rows, m samples of a logical shard, C critics.

CODED = 2048  # windows of one call of `learn` that computes codes
_SETTING = {"encoder": "transformer"}  # networks whose learning rate is called after something else
ADOPTED = ("tasks", "worker", "labelled")  # names, settings of workers, rows of files and of their longest episode
# What workers must have in common, so that their networks can be stacked and their labels mean the same.
ALIKE = ("units", "depth", "critics", "layer_norm", "scale_observation", "log_std_min", "log_std_max", "gamma")


def distillation_loss(mean: Array, log_std: Array, mu: Array, expert_log_std: Array, weight: Array) -> Array:
    """How far a squashed Gaussian is from an expert's, mean over samples and numbers of an action, float32[].

    (tanh(mean) - mu)^2 + 0.2 (log_std - expert_log_std)^2 * 2 / max(2, -expert_log_std): deviations of experts that
    hardly deviate count less.

    mean, log_std: float32[N, n] before squashing; mu: float32[N, n], the expert's squashed mean; weight: float32[N].
    """
    spread = 2.0 / jnp.maximum(2.0, -expert_log_std)
    error = jnp.square(jnp.tanh(mean) - mu) + 0.2 * spread * jnp.square(log_std - expert_log_std)
    return jnp.mean(weight[:, None] * error)


@pytree
class CollectiveParameters:
    """Parameters and optimisers, the same on every device.

    Attributes:
        workers: {"actor", "critic", "log_alpha"} of all workers, leaves [K, ...].
        encoder: of the transformer.
        actor: of the policy.
        critic: leaves [C, ...].
        world: of the world model, () without one.
        encoder_optimiser, actor_optimiser, critic_optimiser, world_optimiser: Adam's.
        coded: int32[], rows of the set whose codes are the trained transformer's.
    """

    workers: Any
    encoder: Any
    actor: Any
    critic: Any
    world: Any
    encoder_optimiser: Any
    actor_optimiser: Any
    critic_optimiser: Any
    world_optimiser: Any
    coded: Array


@pytree
class Memory:
    """What acting remembers, leaves [B, ...].

    Attributes:
        window: Window of the last steps.
        action: float32[B, n], the newest one.
        step: int32[B], steps of the episode so far.
        episode: int32[B], a number that tells episodes of an environment apart.
    """

    window: Window
    action: Array
    step: Array
    episode: Array


@dataclasses.dataclass(frozen=True)
class Collective(Algorithm):
    """One policy for the tasks of several workers, told the task by a code of the last steps."""

    workers: str = setting("", "runs of sac, one for each task, with commas between")
    labelled: str = setting(
        "", "files of labelled sets (see jaxrl/runtime/expert_dataset.py), with commas between, beside or without"
    )
    adopted: str = setting("", "what follows from workers and labelled sets, as JSON; filled in from them", flag=False)
    state_entries: tuple[int, ...] = setting((), "entries of the observation that make the state; empty = all")
    random_steps: int = setting(
        8000, "environment steps per task with random actions (at least an episode everywhere)", between=(1, 1e9)
    )
    learner_steps: int = setting(
        32_000, "then, so many in which the learner acts and learns (likewise; 0 = none)", between=(0, 1e9)
    )
    worker_steps: int = setting(20_000, "then, so many in which the workers act (likewise; 0 = none)", between=(0, 1e9))
    update_interval: int = setting(8, "steps of every environment between calls of learn", between=(1, 100_000))
    burst_updates: int = setting(8000, "updates of the actor behind the random steps", between=(0, 1e9))
    updates_per_step: float = setting(
        1.0, "its updates per step of the batch of environments while it acts", between=(1e-6, 1e5)
    )
    transformer_updates: int = setting(
        9000, "updates of the transformer, when everything is collected", between=(1, 1e9)
    )
    transformer_batch: int = setting(128, "windows of each", between=(1, 2**24))
    transformer_lr: float = setting(2e-4, "its learning rate (Adam)", between=RATE)
    window: int = setting(20, "steps that the transformer reads", between=(2, 10_000))
    code_size: int = setting(6, "numbers of a task code", between=(1, 2**14))
    width: int = setting(32, "of the transformer's tokens", between=(1, 2**14))
    hidden: int = setting(128, "units of its dense layers", between=(1, 2**16))
    heads: int = setting(8, "of its attention", between=(1, 2**10))
    layers: int = setting(3, "of its encoder", between=(1, 100))
    dropout: float = setting(0.1, "share of units that its training drops", between=(0, 0.99))
    contrast_weight: float = setting(0.25, "of InfoNCE beside the reconstruction", between=(0, 1e6))
    temperature: float = setting(0.15, "of InfoNCE", between=(1e-6, 1e6))
    actor_updates: int = setting(50_000, "updates of the actor with the trained transformer's codes", between=(1, 1e9))
    critic_updates: int = setting(10_000, "updates of the critics; 0 = none", between=(0, 1e9))
    world_updates: int = setting(
        0, "updates of a world model whose latents actor and critics then see; 0 = none", between=(0, 1e9)
    )
    world_lr: float = setting(1e-4, "its learning rate (Adam)", between=RATE)
    world_decay: float = setting(1e-5, "its weight decay", between=(0, 1e3))
    latent: int = setting(512, "numbers of its latents, a multiple of 8", between=(1, 2**16))
    batch_size: int = setting(256, "steps of each update of actor and critics", between=(1, 2**24))
    actor_lr: float = setting(2e-4, "learning rate of the actor (Adam)", between=RATE)
    critic_lr: float = setting(2e-4, "learning rate of the critics (Adam)", between=RATE)
    lr_final: float = setting(
        1.0, "learning rates fall linearly to this share of themselves at their last update", between=UNIT
    )
    units: int = setting(300, "units of each hidden layer of actor and critics", between=(1, 2**16))
    depth: int = setting(2, "their hidden layers", between=(1, 100))
    critics: int = setting(2, "critics", between=(1, 100))
    updates_per_call: int = setting(50, "updates of an iteration that only learns", between=(1, 100_000))

    recurrent: ClassVar[bool] = True
    modes: ClassVar[tuple[Mode, ...]] = ("best", "sample", "zero_code")
    sources: ClassVar[tuple[str, ...]] = ("workers",)
    recordings: ClassVar[tuple[str, ...]] = ("labelled",)

    def __post_init__(self) -> None:
        spec, action = self.spec, self.spec.action
        if not (
            spec.num_agents == 1
            and all(isinstance(box, Box) and len(box.shape) == 1 for box in (spec.observation, action))
        ):
            raise ValueError(
                f"collective takes one agent with a vector as observation and action, unlike '{spec.name}'"
            )
        if not isinstance(action, Box) or (action.low, action.high) != (-1.0, 1.0):
            raise ValueError(f"collective takes actions in [-1, 1], those of '{spec.name}' are {action}")
        read_adopted(self.adopted or "{}", ADOPTED)
        size = math.prod(spec.observation.shape)
        if not all(0 <= entry < size for entry in self.state_entries):
            raise ValueError(f"state_entries must lie between 0 and {size - 1}, as observations have {size} numbers")
        if len(set(self.state_entries)) < len(self.state_entries):
            raise ValueError(f"state_entries {self.state_entries} name an entry twice: name each one once")
        super().__post_init__()
        if self.width % self.heads:
            raise ValueError(f"heads {self.heads} do not divide width {self.width}")
        if self.latent % world_model.GROUP:
            raise ValueError(f"latent must be a multiple of {world_model.GROUP}, not {self.latent}")
        if not 2 <= self.window <= spec.horizon:
            raise ValueError(f"window must lie between 2 and the {spec.horizon} steps of an episode, not {self.window}")
        if self.batch_size % self.layout.shards or self.transformer_batch % self.layout.shards:
            raise ValueError(
                f"{self.layout.shards} logical shards do not divide batch_size {self.batch_size} and transformer_batch "
                f"{self.transformer_batch}: choose multiples of them, or fewer --logical_shards"
            )

    @classmethod
    def batch(cls, spec: EnvSpec, settings: dict[str, Any], num_envs: int) -> int:
        return math.gcd(*(int(settings.get(name, getattr(cls, name))) for name in ("batch_size", "transformer_batch")))

    @classmethod
    def adopt(
        cls,
        spec: EnvSpec,
        settings: dict[str, Any],
        sources: dict[str, tuple[Source, ...]],
        recordings: dict[str, dict[str, Any]],
    ) -> dict[str, Any]:
        """Workers in the order of the environment's tasks, what their networks are like, and the size of files."""
        recording = recordings.get("labelled")
        ordered = _ordered_workers(spec, sources["workers"], recording is not None)
        worker = {name: ordered[0].settings[name] for name in ALIKE} if ordered else {}
        for source in ordered:
            for name, value in worker.items():
                if source.settings[name] != value:
                    raise ValueError(
                        f"{ordered[0].run} was trained with {name} {value}, {source.run} with "
                        f"{source.settings[name]}: take workers that are alike"
                    )
        tasks, rows = list(spec.task_names), [0, 0]
        if recording is not None:
            _check_recording(recording, spec)
            tasks = list(dict.fromkeys([*(tasks if ordered else ()), *recording["task_names"]]))
            lengths = dataset.lengths(recording["step"]) + 1
            rows = [int(lengths.sum()), int(lengths.max())]
        if len(tasks) < 2:
            raise ValueError(
                f"collective needs several tasks, there is {', '.join(tasks)} alone: name workers of more tasks and "
                "let the environment set them, or add labelled sets"
            )
        adopted = json.dumps(dict(zip(ADOPTED, (tasks, worker, rows), strict=True)))
        return settings | {"workers": ",".join(source.run for source in ordered), "adopted": adopted}

    @property
    def _adopted(self) -> dict[str, Any]:
        named = dict(zip(ADOPTED, (list(self.spec.task_names), {}, [0, 0]), strict=True))
        return named | read_adopted(self.adopted or "{}", ADOPTED)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of all tasks: those of the workers, then those that only labelled sets have."""
        return tuple(self._adopted["tasks"])

    @property
    def _workers(self) -> int:
        """K. (Where nothing is named, one for each of the environment's tasks.)"""
        return len(self.workers.split(",")) if self.workers else 0 if self.labelled else self.spec.num_tasks

    @property
    def worker(self) -> Sac:
        """What a worker is; its replay and minibatches are as small as they may be."""
        spec = dataclasses.replace(self.spec, num_tasks=1, task_names=())
        sizes: dict[str, Any] = {"batch_size": self.layout.shards, "buffer_size": 4 * self.layout.num_envs}
        return Sac(spec, self.layout, **sizes, **self._adopted["worker"])

    # Phases

    def _calls(self, steps: int) -> int:
        """Calls of `learn` in which every environment makes its share of steps per task, and at least an episode."""
        each = -(-steps * self._workers // self.layout.num_envs)
        return -(-max(each, self.spec.horizon + 1) // self.update_interval) if each else 0

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Random steps, a burst of updates, the learner's steps, the workers'; transformer, codes, the networks."""
        interval = self.update_interval

        def collect(name: str, steps: int, updates: int = 0) -> Phase:
            return Phase(name, interval, updates, iterations=self._calls(steps))

        def study(name: str, updates: int) -> Phase:
            return Phase(name, 0, self.updates_per_call, iterations=-(-updates // self.updates_per_call))

        phases = (
            collect("random", self.random_steps),
            study("burst", self.burst_updates if self._calls(self.learner_steps) else 0),
            collect("learner", self.learner_steps, max(1, round(interval * self.updates_per_step))),
            collect("worker", self.worker_steps),
            study("transformer", self.transformer_updates),
            Phase("codes", 0, 0, iterations=-(-self.rows // self._coded_rows)),
            study("world", self.world_updates),
            study("actor", self.actor_updates),
            study("critic", self.critic_updates),
        )
        return tuple(phase for phase in phases if phase.iterations)

    @property
    def _until(self) -> tuple[int, int]:
        """Steps of the batch at which random actions end, and those of the learner."""
        random, learner = self._calls(self.random_steps), self._calls(self.learner_steps)
        return random * self.update_interval, (random + learner) * self.update_interval

    @property
    def rows(self) -> int:
        """R: what labelled sets bring, everything that is collected, and the row behind."""
        return self.labelled_rows + self._until[1] + self._calls(self.worker_steps) * self.update_interval + 1

    @property
    def labelled_rows(self) -> int:
        """Rows of each environment that hold the episodes of labelled sets, however these are dealt out."""
        rows, longest = self._adopted["labelled"]
        return -(-rows // self.layout.num_envs) + longest

    @property
    def _coded_rows(self) -> int:
        """Rows whose codes one call of `learn` computes."""
        return min(self.rows, max(1, CODED // self.layout.num_envs))

    def summary(self) -> list[str]:
        steps, names = (self.rows - 1) * self.layout.num_envs, ", ".join(self.tasks)
        phases = ", ".join(
            f"{phase.name} {phase.iterations * (phase.steps * self.layout.num_envs or phase.updates):,}"
            + (" steps" if phase.steps else " updates")
            for phase in self.phases
            if phase.iterations and (phase.steps or phase.updates)
        )
        size = steps * self._row_bytes / 1e6
        return [f"Room for {steps:,} labelled steps of {names} in {size:,.3g} MB; phases: {phases}."]

    # Sizes

    @property
    def _actions(self) -> int:
        return math.prod(self.spec.action.shape)

    @property
    def _states(self) -> int:
        return len(self.state_entries) or math.prod(self.spec.observation.shape)

    @property
    def _seen(self) -> dict[str, jax.ShapeDtypeStruct]:
        size = math.prod(self.spec.observation.shape)
        return {
            "observation": jax.ShapeDtypeStruct((size,), jnp.float32),
            "task": jax.ShapeDtypeStruct((), jnp.int32),
        }

    @property
    def _answer(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Of a row: action, labels (mu, log_std, Q), code, step of the episode, whether it is held out."""
        numbers = dict.fromkeys(("action", "mu", "log_std"), (self._actions,)) | {"code": (self.code_size,)}
        floats = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in (numbers | {"value": ()}).items()}
        return floats | {"step": jax.ShapeDtypeStruct((), jnp.int32), "held_out": jax.ShapeDtypeStruct((), jnp.bool_)}

    @property
    def _row_bytes(self) -> int:
        return replay.row_bytes(self._seen, self._answer, 1)

    def largest_chunk(self) -> int:
        """Gradients are never cut: InfoNCE compares all windows of a batch."""
        return 0

    def data_bytes(self) -> int:
        """Activations of a batch of the transformer, two views of each window, and their gradients."""
        tokens = 3 * self.window - 1
        layer = tokens * (6 * self.width + 2 * self.hidden) + 3 * self.heads * tokens**2
        return 4 * 2 * 2 * self.layers * layer * self.transformer_batch // self.layout.devices

    # Networks

    @property
    def encoder_net(self) -> TrajectoryTransformer:
        """A window -> its code and what its tokens were."""
        return TrajectoryTransformer(
            self._states, self._actions, self.code_size, self.window, self.width, self.hidden, self.heads, self.layers,
            self.dropout, self.layout.compute_dtype,
        )  # fmt: skip

    @property
    def actor_net(self) -> networks.MLP:
        """[code, state] float32[N, c + s] -> mean and raw deviation float32[N, 2 n]."""
        return networks.MLP(2 * self._actions, self.units, self.depth, "xavier", self.layout.compute_dtype)

    @property
    def critic_net(self) -> networks.MLP:
        """[code, state, action] float32[N, c + s + n] -> float32[N, 1]."""
        return networks.MLP(1, self.units, self.depth, "xavier", self.layout.compute_dtype)

    @property
    def world_net(self) -> WorldModel:
        return WorldModel(self.latent, self.layout.compute_dtype)

    def states(self, observation: Array) -> Array:
        """float32[..., s] of flat observations [..., D]."""
        observation = observation.astype(jnp.float32)
        return observation[..., np.array(self.state_entries)] if self.state_entries else observation

    def _task(self, timestep: TimeStep) -> Array:
        """int32[...], the task that each time step belongs to."""
        return timestep.task if self.spec.num_tasks > 1 else jnp.zeros(timestep.first.shape, jnp.int32)

    def codes(self, encoder: Any, window: Window) -> Array:
        """Task codes float32[N, c] of windows [N, ...]."""
        return jax.vmap(lambda one: self.encoder_net.apply(encoder, one)[0])(window)

    def inputs(self, world: Any, code: Array, state: Array) -> Array:
        """What actor and critics see of codes [N, c] and states [N, s]; `world` is () without a world model."""
        seen = self.world_net.apply(world, state, code) if self.world_updates else state
        return jnp.concatenate([code, jnp.asarray(seen)], axis=-1)

    def gaussian(self, actor: Any, inputs: Array) -> tuple[Array, Array]:
        """Mean and log standard deviation before squashing, each float32[N, n]."""
        mean, raw = jnp.split(jnp.asarray(self.actor_net.apply(actor, inputs)), 2, axis=-1)
        low, high = self.worker.log_std_min, self.worker.log_std_max
        return mean, low + (high - low) / 2 * (jnp.tanh(raw) + 1)

    def values(self, critic: Any, inputs: Array, action: Array) -> Array:
        """Q float32[C, N]."""
        rows = jnp.concatenate([inputs, action], axis=-1)
        return jax.vmap(lambda params: jnp.asarray(self.critic_net.apply(params, rows))[:, 0])(critic)

    def answer(self, policy: Any, window: Window, zero_code: bool = False) -> tuple[Array, Array]:
        """The collective's Gaussian before squashing, mean and log standard deviation, each float32[N, n].

        Args:
            policy: {"encoder", "world", "actor"}, as in `policy` and `weights`.
            window: [N, ...], see `watch`.
            zero_code: zeros take the place of the task code, to see what it is worth.
        """
        code = jnp.zeros((len(window.state), self.code_size)) if zero_code else self.codes(policy["encoder"], window)
        return self.gaussian(policy["actor"], self.inputs(policy["world"], code, window.state[:, -1]))

    def networks(self, key: Array) -> dict[str, Any]:
        """Fresh "encoder", "world" (() without a world model), "actor" and "critic", the latter's leaves [C, ...]."""
        key_encoder, key_actor, key_critic, key_world = jax.random.split(key, 4)
        code, state, action = (jnp.zeros((1, n)) for n in (self.code_size, self._states, self._actions))
        window = jax.tree.map(lambda x: x[0], transformer.first_window(state, self._actions, self.window))
        world: Any = ()
        if self.world_updates:
            world = self.world_net.init(key_world, state, code, action, method="step")
        seen = self.inputs(world, code, state)
        wide = jnp.concatenate([seen, action], axis=-1)
        return {
            "encoder": self.encoder_net.init(key_encoder, window),
            "world": world,
            "actor": self.actor_net.init(key_actor, seen),
            "critic": jax.vmap(lambda k: self.critic_net.init(k, wide))(jax.random.split(key_critic, self.critics)),
        }

    # Protocol

    def init(self, key: Array, inputs: Any) -> AlgoState:
        """Fresh networks and an empty set, but for what labelled sets bring.

        `inputs` may hold "workers", weights of each in the order of the tasks, and "labelled", of `arrange`. Without
        inputs the workers are fresh ones, too, which serves for shapes.
        """
        key_workers, key = jax.random.split(key)
        given = (inputs or {}).get("workers")
        if given:
            workers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *given)
        else:
            fresh = lambda key: self.worker.weights(self.worker.init(key, None))  # noqa: E731
            workers = jax.vmap(fresh)(jax.random.split(key_workers, max(self._workers, 1)))
        own = self.networks(key)
        optimisers = {
            f"{name}_optimiser": self._falling(name).init(optimizers.flat(tree)) if tree else ()
            for name, tree in own.items()
        }
        params = CollectiveParameters(workers=workers, **own, **optimisers, coded=jnp.int32(0))
        shards, envs = self.layout.local_shards, self.layout.num_envs // self.layout.shards
        ring = replay.create(self._seen, self._answer, 1, shards, self.rows, envs)
        if inputs and "labelled" in inputs:
            ring = dataset.fill(ring, inputs["labelled"], self.layout)
        return AlgoState(params, ring)

    def weights(self, state: AlgoState) -> Any:
        """What `answer` takes, and a student with it: {"encoder", "world", "actor"}."""
        return {name: getattr(state.replicated, name) for name in ("encoder", "world", "actor")}

    def policy(self, state: AlgoState) -> Any:
        """The same, and the workers, who act while their set is collected."""
        return self.weights(state) | {"workers": state.replicated.workers["actor"]}

    def init_actor(self, policy: Any, timestep: TimeStep, indices: Array) -> Memory:
        state = self.states(timestep.observation.reshape(len(indices), -1))
        window = transformer.first_window(state, self._actions, self.window)
        return Memory(window, jnp.zeros((len(indices), self._actions)), jnp.zeros_like(indices), indices)

    def watch(self, memory: Memory, timestep: TimeStep) -> Memory:
        """The memory once a time step [B] is seen, before it is answered (`action` is still the one before)."""
        state, first = self.states(timestep.observation.reshape(len(memory.step), -1)), timestep.first
        return dataclasses.replace(
            memory,
            window=transformer.next_window(memory.window, state, memory.action, timestep.reward[:, 0], first),
            step=jnp.where(first, 0, memory.step + 1),
            episode=memory.episode + first.astype(jnp.int32),
        )

    def act(
        self, policy: Any, actor: Any, timestep: TimeStep, keys: Array, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """In training who acts depends on the phase; else the collective does, with mode "best" by tanh(mean)."""
        memory = self.watch(actor, timestep)
        noise = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, 0), (self._actions,)))(keys)

        def uniform() -> Array:
            draw = lambda key: jax.random.uniform(key, (self._actions,), minval=-1.0, maxval=1.0)  # noqa: E731
            return jax.vmap(lambda key: draw(jax.random.fold_in(key, 1)))(keys)

        def worker() -> Array:
            mean, log_std = jax.vmap(lambda params: self.worker.gaussian(params, timestep.observation))(
                policy["workers"]
            )
            mean, log_std = (_of_task(x[:, :, 0], self._task(timestep)) for x in (mean, log_std))
            return distributions.squashed_normal(mean, log_std, noise)[0]

        extras: Any = ()
        if mode == "explore":
            done = total(progress.vector_steps)
            stage = jnp.sum(done >= jnp.array(self._until, jnp.float32), dtype=jnp.int32)
            # nobody reads the codes of the workers' steps before the transformer is trained
            code = jax.lax.cond(
                stage < 2,
                lambda: self.codes(policy["encoder"], memory.window),
                lambda: jnp.zeros((len(keys), self.code_size)),
            )
            seen = lambda: self.inputs(policy["world"], code, memory.window.state[:, -1])  # noqa: E731
            learner = lambda: distributions.squashed_normal(*self.gaussian(policy["actor"], seen()), noise)[0]  # noqa: E731
            action = jax.lax.switch(stage, [uniform, learner, worker])
            held_out = memory.episode % dataset.HELD_OUT == 0
            extras = {"action": action, "code": code, "step": memory.step, "held_out": held_out}
        else:
            mean, log_std = self.answer(policy, memory.window, mode == "zero_code")
            action = distributions.squashed_normal(mean, log_std, noise)[0] if mode == "sample" else jnp.tanh(mean)
        return action[:, None].astype(self.spec.action.dtype), dataclasses.replace(memory, action=action), extras

    # The labelled set

    def _labels(self, workers: Any, observation: Array, task: Array, noise: Array) -> dict[str, Array]:
        """What each task's worker says of observations [N, D], leaves float32[N, ...]; noise [N, n]."""

        def of(worker: Any) -> dict[str, Array]:
            mean, log_std = self.worker.gaussian(worker["actor"], observation[:, None])
            action, log_prob = distributions.squashed_normal(mean, log_std, noise[:, None])
            values = self.worker.values(worker["critic"], observation[:, None], action).min(0)
            soft = values - jnp.exp(worker["log_alpha"])[None] * log_prob
            return {"mu": jnp.tanh(mean[:, 0]), "log_std": log_std[:, 0], "soft_value": soft[:, 0]}

        return jax.tree.map(lambda x: _of_task(x, task), jax.vmap(of)(workers))

    def _store(self, params: Any, ring: Replay, trajectory: Trajectory, last: TimeStep, key: Array) -> Replay:
        """The trajectory with labels, and the row behind it."""
        step = trajectory.timestep
        join = lambda rows, last: jnp.concatenate([rows, last[None].astype(rows.dtype)])  # noqa: E731
        flat = lambda x: x.reshape(*x.shape[:-2], -1).astype(jnp.float32)  # noqa: E731
        seen = {
            "observation": join(flat(step.observation), flat(last.observation)),
            "task": join(self._task(step), self._task(last)),
        }
        reward, terminated = join(step.reward, last.reward), join(step.terminated, last.terminated)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, self.layout.env_indices())
        noise = jax.vmap(lambda k: jax.random.normal(k, (len(reward), self._actions)))(keys).swapaxes(0, 1)

        def label(rows: dict[str, Array]) -> dict[str, Array]:
            shape = rows["task"].shape
            merged = {name: x.reshape(-1, *x.shape[2:]) for name, x in rows.items()}
            said = self._labels(params.workers, merged["observation"], merged["task"], merged["noise"])
            said = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), said)
            later = self.worker.gamma * (1 - rows["terminated"][1:]) * said.pop("soft_value")[1:]
            return {name: x[:-1] for name, x in said.items()} | {"value": rows["reward"][1:] + later}

        rows = seen | {"noise": noise, "reward": reward[..., 0], "terminated": terminated.astype(jnp.float32)}
        labels = self.layout.over_envs(label, rows, axis=1)
        end = replay.ends(terminated, join(step.truncated, last.truncated))
        return replay.write(ring, seen, trajectory.extras | labels, reward, end)

    # The labelled set, read

    def arrange(self, recording: dict[str, Any]) -> dict[str, np.ndarray]:
        """See `labelled_ring.arrange`."""
        return dataset.arrange(recording, self.tasks, self.labelled_rows, self.layout)

    def coded_windows(self, ring: Replay) -> dict[str, np.ndarray]:
        """Of all full windows of a set with codes: "code" float32[N, c], "task" int32[N], "held_out" bool[N]."""
        return dataset.coded_windows(ring, self.window)

    def _windows(self, ring: Replay, index: Array) -> Window:
        """Windows [S, m, ...] that end at rows int32[S, m]."""
        return dataset.windows(ring, index, self.states, self.window)

    # Learning

    def learn(
        self,
        state: AlgoState,
        trajectory: Trajectory | None,
        last_timestep: TimeStep | None,
        key: Array,
        progress: Progress,
        phase: Phase,
    ) -> tuple[AlgoState, dict[str, Array]]:
        """Label and store what was collected, then what the phase is for."""
        params, ring = state.replicated, state.split
        key_labels, key_updates = jax.random.split(key)
        if trajectory is not None and last_timestep is not None:
            ring = self._store(params, ring, trajectory, last_timestep, key_labels)
        metrics: dict[str, Array] = {}
        if phase.name == "codes":
            params, ring = self._encode(params, ring)
        elif phase.name == "transformer":
            params, metrics = self._train_transformer(params, ring, key_updates, phase.updates)
        elif phase.updates:  # "world" and "critic" their own network; burst, learner and "actor" the actor
            name = phase.name if phase.name in ("world", "critic") else "actor"
            params, metrics = self._fit(params, ring, key_updates, phase.updates, name)
        return AlgoState(params, ring), metrics

    def _fit(self, params: Any, ring: Replay, key: Array, updates: int, name: str) -> tuple[Any, dict[str, Array]]:
        """Updates of world model, actor or critics, and their error on held-out steps."""
        usable, held_out = dataset.usable(ring) & self._has_code(params), ring.answer["held_out"]

        def batch(key: Array, counts: Array) -> dict[str, Array]:
            index, weight = dataset.draw(key, counts, self.batch_size, self.layout)
            return dataset.samples(ring, index, self.states) | {"weight": weight}

        def loss(network: Any, sample: dict[str, Array]) -> tuple[Array, Any]:
            return getattr(self, f"_{name}_error")(dataclasses.replace(params, **{name: network}), sample), {}

        key_held_out, key = jax.random.split(key)
        training = dataset.count_up(usable & ~held_out)
        decay = self.world_decay if name == "world" else 0.0
        params, metrics = self._improve(
            self.layout, params, name, loss, lambda key: batch(key, training), jax.random.split(key, updates), decay
        )
        checked = batch(key_held_out, dataset.count_up(usable & held_out))
        _, (value, _) = self.layout.gradient(loss, getattr(params, name), checked)
        share = jnp.maximum(self.layout.average(checked["weight"]), 1e-6)  # 0 while nothing is held out yet
        return params, metrics | {f"{name}_held_out_loss": value / share}

    def _has_code(self, params: Any) -> Array:
        """bool[1, R, 1]: rows that were collected, and those of files that the phase "codes" has been through."""
        row = jnp.arange(self.rows)[None, :, None]
        return (row >= self.labelled_rows) | (row < params.coded)

    def _world_error(self, params: Any, sample: dict[str, Array]) -> Array:
        code, apply = sample["code"], self.world_net.apply
        stepped: Any = apply(params.world, sample["state"], code, sample["action"], method="step")
        latent = jnp.asarray(apply(params.world, sample["next_state"], code))
        return world_model.world_loss(stepped[0], latent, stepped[1], sample["reward"], sample["weight"])

    def _actor_error(self, params: Any, sample: dict[str, Array]) -> Array:
        inputs = self.inputs(params.world, sample["code"], sample["state"])
        mean, log_std = self.gaussian(params.actor, inputs)
        return distillation_loss(mean, log_std, sample["mu"], sample["log_std"], sample["weight"])

    def _critic_error(self, params: Any, sample: dict[str, Array]) -> Array:
        inputs = self.inputs(params.world, sample["code"], sample["state"])
        values = self.values(params.critic, inputs, sample["action"])
        return jnp.sum(jnp.mean(sample["weight"][None] * jnp.square(values - sample["value"][None]), axis=1))

    def _improve(
        self, layout: Layout, params: Any, name: str, loss: Any, batch: Any, keys: Array, decay: float = 0.0
    ) -> tuple[Any, dict[str, Array]]:
        """One Adam step of a network, as a vector, for each key: parameters, metrics float32[updates]."""
        network, rate = getattr(params, name), jnp.float32(getattr(self, f"{_SETTING.get(name, name)}_lr"))
        optimiser = self._falling(name)

        def of_vector(vector: Array, sample: Any) -> tuple[Array, Any]:
            return loss(optimizers.unflat(vector, network), sample)

        def step(gradient: Array, vector: Array, state: Any) -> Any:
            new = optimizers.descend(optimiser, gradient + decay * vector, vector, state, rate)
            return *new, optimizers.norm(gradient)

        def update(carry: Any, key: Array) -> Any:
            vector, state = carry
            gradient, (value, parts) = layout.gradient(of_vector, vector, batch(key))
            vector, state, norm = layout.alone(step)(gradient, vector, state)
            return (vector, state), {f"{name}_loss": value, f"{name}_grad_norm": norm, **parts}

        carry = optimizers.flat(network), getattr(params, f"{name}_optimiser")
        (vector, state), metrics = jax.lax.scan(update, carry, keys)
        new = {name: optimizers.unflat(vector, network), f"{name}_optimiser": state}
        return dataclasses.replace(params, **new), metrics

    def _falling(self, name: str) -> optax.GradientTransformation:
        """The optimiser of a network, whose steps shrink over all its updates to `lr_final` of their length."""
        fall = optax.linear_schedule(1.0, self.lr_final, max(self._updates_of(name), 1))
        return optax.chain(self.optimiser(name), optax.scale_by_schedule(fall))

    def _updates_of(self, name: str) -> int:
        """Updates that a network gets in all phases."""
        names = ("burst", "learner", "actor") if name == "actor" else (_SETTING.get(name, name),)
        return sum(phase.updates * (phase.iterations or 0) for phase in self.phases if phase.name in names)

    # The transformer

    def _train_transformer(self, params: Any, ring: Replay, key: Array, updates: int) -> tuple[Any, dict[str, Array]]:
        """Updates on full windows of training episodes; losses and nearest neighbours of held-out ones."""
        full = dataset.usable(ring) & (ring.answer["step"] >= self.window - 1)
        held_out = ring.answer["held_out"]
        training, checking = dataset.count_up(full & ~held_out), dataset.count_up(full & held_out)
        # InfoNCE compares the windows of a batch: all of them (those of a logical shard where bits must not change)
        layout = dataclasses.replace(self.layout, learn_chunk=0)

        def batch(key: Array, counts: Array) -> dict[str, Any]:
            key_rows, key_noise = jax.random.split(key)
            index, weight = dataset.draw(key_rows, counts, self.transformer_batch, self.layout)
            keys = jax.vmap(lambda k: jax.random.split(k, index.shape[1]))(layout.shard_keys(key_noise))
            task = dataset.tasks_at(ring, index)
            return {"window": self._windows(ring, index), "task": task, "key": keys, "weight": weight}

        def loss(encoder: Any, sample: dict[str, Any]) -> tuple[Array, dict[str, Array]]:
            return self.encoder_loss(encoder, sample, True)

        def check(encoder: Any, sample: dict[str, Any]) -> tuple[Array, dict[str, Array]]:
            loss, parts = self.encoder_loss(encoder, sample, False)
            windows = jax.tree.map(lambda *x: jnp.concatenate(x), sample["known"], sample["window"])
            known, asked = jnp.split(self.codes(encoder, windows), 2)
            return loss, parts | {
                "code_accuracy": neighbour_accuracy(
                    known, sample["known_task"], asked, sample["task"], sample["known_weight"], sample["weight"]
                )
            }

        key_known, key_held_out, key = jax.random.split(key, 3)
        params, metrics = self._improve(
            layout, params, "encoder", loss, lambda key: batch(key, training), jax.random.split(key, updates)
        )
        known, asked = batch(key_known, training), batch(key_held_out, checking)
        known = {"known": known["window"], "known_task": known["task"], "known_weight": known["weight"]}
        _, (_, parts) = layout.gradient(check, params.encoder, asked | known)
        return params, metrics | {f"held_out_{name}": value for name, value in parts.items()}

    def encoder_loss(self, encoder: Any, sample: dict[str, Any], training: bool) -> tuple[Array, dict[str, Array]]:
        """Reconstruction of two masked views and InfoNCE between their codes.

        sample: {"window", "task", "key", "weight"} [N, ...]; a weight of 0 stands for no window at all.
        """

        def view(key: Array, window: Window) -> tuple[Array, Window, Window]:
            key_mask, key_dropout = jax.random.split(key)
            hidden, masked = transformer.mask_tokens(key_mask, window)
            rngs = {"dropout": key_dropout} if training and self.dropout else None
            out: Any = self.encoder_net.apply(encoder, hidden, rngs is not None, rngs=rngs)
            return *out, masked

        def masked_view(number: Array) -> tuple[Array, Array]:
            keys = jax.vmap(lambda key: jax.random.fold_in(key, number))(sample["key"])
            code, predicted, masked = jax.vmap(view)(keys, sample["window"])
            masked = jax.tree.map(lambda hit: hit & (sample["weight"] > 0)[:, None], masked)
            return code, transformer.reconstruction_loss(predicted, sample["window"], masked)

        codes, errors = jax.vmap(masked_view)(jnp.arange(2))
        error = errors.sum()
        views = [Views(code, sample["task"], sample["weight"]) for code in codes]
        contrast = transformer.contrastive_loss(views[0], *self.layout.together(views[1]), self.temperature)
        return error + self.contrast_weight * contrast, {"reconstruction": error, "contrast": contrast}

    def _encode(self, params: Any, ring: Replay) -> tuple[Any, Replay]:
        """Codes of the next rows of the set by the trained transformer."""
        shards, _, envs = ring.end.shape
        begin = jnp.minimum(params.coded, self.rows - self._coded_rows)

        def of_row(row: Array) -> Array:
            index = jnp.broadcast_to(row * envs + jnp.arange(envs, dtype=jnp.int32)[None], (shards, envs))
            return self.layout.apply(lambda window: self.codes(params.encoder, window), self._windows(ring, index))

        codes = jax.lax.map(of_row, begin + jnp.arange(self._coded_rows, dtype=jnp.int32)).swapaxes(0, 1)
        stored = jax.lax.dynamic_update_slice_in_dim(ring.answer["code"], codes, begin, axis=1)
        ring = dataclasses.replace(ring, answer=ring.answer | {"code": stored})
        return dataclasses.replace(params, coded=params.coded + self._coded_rows), ring


def neighbour_accuracy(
    known: Array, known_task: Array, asked: Array, task: Array, known_weight: Array, weight: Array
) -> Array:
    """Share of codes float32[N, c] whose nearest known code float32[M, c] (by cosine) is of their task int32[N].

    Codes with a weight of 0 stand for nothing.
    """
    known, asked = (code * jax.lax.rsqrt(jnp.sum(code**2, -1, keepdims=True) + 1e-12) for code in (known, asked))
    nearest = jnp.argmax(jnp.where(known_weight > 0, asked @ known.T, -jnp.inf), axis=-1)
    found = (known_task[nearest] == task).astype(jnp.float32)
    return jnp.sum(weight * found) / jnp.maximum(weight.sum(), 1.0)


def _ordered_workers(spec: EnvSpec, sources: tuple[Source, ...], without: bool) -> list[Source]:
    """Workers in the order of the environment's tasks; none only if one can do `without`. Raises ValueError."""
    if without and not sources:
        return []
    workers: dict[str, Source] = {}
    for source in sources:
        task = _check_worker(source, spec)
        if task in workers:
            raise ValueError(f"{workers[task].run} and {source.run} are both workers for '{task}': take one")
        workers[task] = source
    missing = [name for name in spec.task_names if name not in workers]
    if missing or not spec.task_names:
        raise ValueError(
            f"there is no worker for {', '.join(map(repr, missing)) or spec.name}: name a run of sac for each of "
            f"{', '.join(spec.task_names) or 'several named tasks'} with --workers RUN1,RUN2,..."
        )
    return [workers[name] for name in spec.task_names]


def _check_worker(source: Source, spec: EnvSpec) -> str:
    """The task of a worker. Raises ValueError where it cannot teach in an environment."""
    run, algo = source.run, source.algo
    if not isinstance(algo, Sac):
        raise ValueError(f"{run} was trained with {type(algo).__name__.lower()}: workers are runs of sac")
    source.check(spec)
    names = algo.spec.task_names
    if len(names) != 1:
        raise ValueError(f"{run} was trained on {len(names)} tasks: a worker knows one")
    if names[0] not in spec.task_names:
        raise ValueError(
            f"{run} was trained on '{names[0]}', which is not among the tasks here ({', '.join(spec.task_names)}): "
            "leave it out, or name its task, too"
        )
    return names[0]


def _check_recording(recording: dict[str, Any], spec: EnvSpec) -> None:
    """Raises ValueError where labelled steps are of another kind than the environment's."""
    for what, name, box in (("observations", "observation", spec.observation), ("actions", "action", spec.action)):
        size = recording[name].shape[1]
        if (size,) != box.shape:
            raise ValueError(
                f"{what} of the labelled sets have {size} numbers, those of '{spec.name}' {math.prod(box.shape)}: take "
                "sets of one arm and one kind of observation"
            )


def _of_task(values: Array, task: Array) -> Array:
    """[N, ...] of [K, N, ...]: the entry of each sample's task int32[N]."""
    index = task.astype(jnp.int32).reshape(1, -1, *(1,) * (values.ndim - 2))
    return jnp.take_along_axis(values, index, axis=0)[0]
