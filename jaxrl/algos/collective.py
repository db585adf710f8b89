"""The collective network: what the workers of several tasks can do, in one policy that is told the task by a code.

Workers (SAC, one for each task) label what random actions, the learner itself and they themselves come across, so that
the learner is taught on states of its own (DAgger, Ross et al. 2011, arXiv 1011.0686). A transformer makes a task code
of the last steps (`jaxrl.trajectory_transformer`); actor and critics of code and state are then fitted to the labels.
Stages, losses and sizes are those of the published collective-learning pipeline
(argator18/A-transformer-based-collective-learning-framework-for-scalable-knowledge-accumulation-and-transfer), but that
value labels mean Q of the step itself, and codes are computed once when the transformer is frozen instead of at every
update. Losses on top, the algorithm below.
"""

import dataclasses
import json
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, Box, EnvSpec, TimeStep, pytree
from jaxrl import distributions, nets, optimise, replay
from jaxrl import trajectory_transformer as transformer
from jaxrl.algos.base import Algorithm, AlgoState, Mode, Phase, Progress, Source, Trajectory, setting, total
from jaxrl.algos.sac import Sac
from jaxrl.replay import Replay
from jaxrl.trajectory_transformer import TrajectoryTransformer, Window

# Layout letters besides T, B, S: K tasks and workers, N samples, n numbers of an action, c of a code, s of a state,
# R rows, E environments of a logical shard, m samples of one, C critics.

HELD_OUT = 5  # one episode in so many is kept for validation
CODED = 2048  # windows of one call of `learn` that computes codes
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
        encoder_optimiser, actor_optimiser, critic_optimiser: Adam's.
        coded: int32[], rows of the set whose codes are the trained transformer's.
    """

    workers: Any
    encoder: Any
    actor: Any
    critic: Any
    encoder_optimiser: Any
    actor_optimiser: Any
    critic_optimiser: Any
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
    worker_settings: str = setting("", "what the workers' networks are like, as JSON; filled in from their runs")
    state_entries: tuple[int, ...] = setting((), "entries of the observation that make the state; empty = all")
    random_steps: int = setting(8000, "environment steps per task with random actions (at least an episode each)")
    learner_steps: int = setting(32_000, "then, so many in which the learner acts and learns; 0 = none")
    worker_steps: int = setting(20_000, "then, so many in which the workers act; 0 = none")
    update_interval: int = setting(8, "steps of every environment between calls of learn")
    burst_updates: int = setting(8000, "updates of the actor behind the random steps")
    updates_per_step: float = setting(1.0, "its updates per step of the batch of environments while it acts")
    transformer_updates: int = setting(9000, "updates of the transformer, when everything is collected")
    transformer_batch: int = setting(128, "windows of each")
    transformer_lr: float = setting(2e-4, "its learning rate (Adam)")
    window: int = setting(20, "steps that the transformer reads")
    code_size: int = setting(6, "numbers of a task code")
    width: int = setting(32, "of the transformer's tokens")
    hidden: int = setting(128, "units of its dense layers")
    heads: int = setting(8, "of its attention")
    layers: int = setting(3, "of its encoder")
    dropout: float = setting(0.1, "share of units that its training drops")
    contrast_weight: float = setting(0.25, "of InfoNCE beside the reconstruction")
    temperature: float = setting(0.15, "of InfoNCE")
    actor_updates: int = setting(50_000, "updates of the actor with the trained transformer's codes")
    critic_updates: int = setting(10_000, "updates of the critics; 0 = none")
    batch_size: int = setting(256, "steps of each update of actor and critics")
    actor_lr: float = setting(2e-4, "learning rate of the actor (Adam)")
    critic_lr: float = setting(2e-4, "learning rate of the critics (Adam)")
    units: int = setting(300, "units of each hidden layer of actor and critics")
    depth: int = setting(2, "their hidden layers")
    critics: int = setting(2, "critics")
    zero_code: bool = setting(False, "zeros instead of task codes, to see what they are worth")
    updates_per_call: int = setting(50, "updates of an iteration that only learns")

    recurrent: ClassVar[bool] = True
    sources: ClassVar[tuple[str, ...]] = ("workers",)

    def __post_init__(self) -> None:
        spec = self.spec
        boxes = spec.observation, spec.action
        if spec.num_agents != 1 or not all(isinstance(box, Box) and len(box.shape) == 1 for box in boxes):
            raise ValueError(
                f"collective takes one agent with a vector as observation and action, unlike '{spec.name}'"
            )
        if (spec.action.low, spec.action.high) != (-1.0, 1.0):
            raise ValueError(f"collective takes actions in [-1, 1], those of '{spec.name}' are {spec.action}")
        if not 2 <= len(spec.task_names) == spec.num_tasks:
            named = ", ".join(spec.task_names) or "none"
            raise ValueError(f"collective needs several tasks with names, '{spec.name}' has {named}: set more of them")
        size = math.prod(spec.observation.shape)
        if not all(0 <= entry < size for entry in self.state_entries):
            raise ValueError(f"state_entries must lie between 0 and {size - 1}, as observations have {size} numbers")
        for name in ("random_steps", "update_interval", "transformer_batch", "batch_size", "code_size", "width",
                     "hidden", "heads", "layers", "units", "depth", "critics", "updates_per_call",
                     "transformer_updates", "actor_updates"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("learner_steps", "worker_steps", "burst_updates", "critic_updates", "contrast_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or above, not {getattr(self, name)}")
        for name in ("transformer_lr", "actor_lr", "critic_lr", "temperature", "updates_per_step"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout}")
        if self.width % self.heads:
            raise ValueError(f"heads {self.heads} do not divide width {self.width}")
        if not 2 <= self.window <= spec.horizon:
            raise ValueError(f"window must lie between 2 and the {spec.horizon} steps of an episode, not {self.window}")
        if self.batch_size % self.layout.shards or self.transformer_batch % self.layout.shards:
            raise ValueError(f"{self.layout.shards} logical shards do not divide batch_size and transformer_batch")

    @classmethod
    def batch(cls, spec: EnvSpec, settings: dict[str, Any], num_envs: int) -> int:
        return math.gcd(*(int(settings.get(name, getattr(cls, name))) for name in ("batch_size", "transformer_batch")))

    @classmethod
    def adopt(cls, spec: EnvSpec, settings: dict[str, Any], sources: dict[str, tuple[Source, ...]]) -> dict[str, Any]:
        """Workers in the order of the environment's tasks, and what their networks are like."""
        workers: dict[str, Source] = {}
        for source in sources["workers"]:
            task = _check_worker(source, spec)
            if task in workers:
                raise ValueError(f"{workers[task].run} and {source.run} are both workers for '{task}': take one")
            workers[task] = source
        missing = [name for name in spec.task_names if name not in workers]
        if missing:
            raise ValueError(
                f"there is no worker for {', '.join(map(repr, missing))}: name a run of sac for each of "
                f"{', '.join(spec.task_names)} with --workers RUN1,RUN2,..."
            )
        ordered = [workers[name] for name in spec.task_names]
        first = {name: ordered[0].settings[name] for name in ALIKE}
        for source in ordered[1:]:
            for name, value in first.items():
                if source.settings[name] != value:
                    raise ValueError(
                        f"{ordered[0].run} was trained with {name} {value}, {source.run} with "
                        f"{source.settings[name]}: take workers that are alike"
                    )
        return settings | {"workers": ",".join(s.run for s in ordered), "worker_settings": json.dumps(first)}

    @property
    def worker(self) -> Sac:
        """What a worker is; its replay and minibatches are as small as they may be."""
        spec = dataclasses.replace(self.spec, num_tasks=1, task_names=())
        sizes = {"batch_size": self.layout.shards, "buffer_size": 4 * self.layout.num_envs}
        return Sac(spec, self.layout, **sizes, **json.loads(self.worker_settings or "{}"))

    # Phases

    def _calls(self, steps: int) -> int:
        """Calls of `learn` in which every environment makes its share of steps per task, and at least an episode."""
        each = -(-steps * self.spec.num_tasks // self.layout.num_envs)
        return -(-max(each, self.spec.horizon + 1) // self.update_interval) if steps else 0

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Random steps, a burst of updates, the learner's steps, the workers'; transformer, codes, actor, critics."""
        interval = self.update_interval

        def collect(name: str, steps: int, updates: int = 0) -> Phase:
            return Phase(name, interval, updates, iterations=self._calls(steps))

        def study(name: str, updates: int) -> Phase:
            return Phase(name, 0, self.updates_per_call, iterations=-(-updates // self.updates_per_call))

        phases = (
            collect("random", self.random_steps),
            study("burst", self.burst_updates if self.learner_steps else 0),
            collect("learner", self.learner_steps, max(1, round(interval * self.updates_per_step))),
            collect("worker", self.worker_steps),
            study("transformer", self.transformer_updates),
            Phase("codes", 0, 0, iterations=-(-self.rows // self._coded_rows)),
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
        """R: everything that is collected, and the row behind."""
        return self._until[1] + self._calls(self.worker_steps) * self.update_interval + 1

    @property
    def _coded_rows(self) -> int:
        """Rows whose codes one call of `learn` computes."""
        return min(self.rows, max(1, CODED // self.layout.num_envs))

    def summary(self) -> list[str]:
        steps, names = (self.rows - 1) * self.layout.num_envs, ", ".join(self.spec.task_names)
        phases = ", ".join(
            f"{phase.name} {phase.iterations * (phase.steps * self.layout.num_envs or phase.updates):,}"
            + (" steps" if phase.steps else " updates")
            for phase in self.phases
            if phase.iterations and (phase.steps or phase.updates)
        )
        size = steps * self._row_bytes / 1e6
        return [f"A labelled set of {steps:,} steps of {names} in {size:,.3g} MB; phases: {phases}."]

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
        """Of a row: action, labels (mu, log_std, soft value), code, step of the episode, whether it is held out."""
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
    def actor_net(self) -> nets.MLP:
        """[code, state] float32[N, c + s] -> mean and raw deviation float32[N, 2 n]."""
        return nets.MLP(2 * self._actions, self.units, self.depth, "xavier", self.layout.compute_dtype)

    @property
    def critic_net(self) -> nets.MLP:
        """[code, state, action] float32[N, c + s + n] -> float32[N, 1]."""
        return nets.MLP(1, self.units, self.depth, "xavier", self.layout.compute_dtype)

    def states(self, observation: Array) -> Array:
        """float32[..., s] of flat observations [..., D]."""
        observation = observation.astype(jnp.float32)
        return observation[..., np.array(self.state_entries)] if self.state_entries else observation

    def codes(self, encoder: Any, window: Window) -> Array:
        """Task codes float32[N, c] of windows [N, ...]."""
        return jax.vmap(lambda one: self.encoder_net.apply(encoder, one)[0])(window)

    def _inputs(self, code: Array, state: Array) -> Array:
        return jnp.concatenate([jnp.zeros_like(code) if self.zero_code else code, state], axis=-1)

    def gaussian(self, actor: Any, code: Array, state: Array) -> tuple[Array, Array]:
        """Mean and log standard deviation before squashing, each float32[N, n]."""
        mean, raw = jnp.split(self.actor_net.apply(actor, self._inputs(code, state)), 2, axis=-1)
        low, high = self.worker.log_std_min, self.worker.log_std_max
        return mean, low + (high - low) / 2 * (jnp.tanh(raw) + 1)

    def values(self, critic: Any, code: Array, state: Array, action: Array) -> Array:
        """Q float32[C, N]."""
        inputs = jnp.concatenate([self._inputs(code, state), action], axis=-1)
        return jax.vmap(lambda params: self.critic_net.apply(params, inputs)[:, 0])(critic)

    def advice(self, policy: Any, window: Window, least_sigma: float = 1e-4) -> tuple[Array, Array]:
        """What a student asks for: mu_c = tanh(mean) and sigma_c, the scale before squashing, each float32[N, n].

        Args:
            policy: {"encoder", "actor"}, as in `policy` and `weights`.
            window: [N, ...], see `watch`.
            least_sigma: floor of sigma_c.
        """
        code = self.codes(policy["encoder"], window)
        mean, log_std = self.gaussian(policy["actor"], code, window.state[:, -1])
        return jnp.tanh(mean), jnp.maximum(jnp.exp(log_std), least_sigma)

    # Protocol

    def init(self, key: Array, inputs: Any) -> AlgoState:
        """Fresh networks and an empty set; `inputs` is {"workers": weights of each, in the order of the tasks}.

        Without inputs the workers are fresh ones, too, which serves for shapes.
        """
        key_workers, key_encoder, key_actor, key_critic = jax.random.split(key, 4)
        if inputs is None:
            fresh = lambda key: self.worker.weights(self.worker.init(key, None))  # noqa: E731
            workers = jax.vmap(fresh)(jax.random.split(key_workers, self.spec.num_tasks))
        else:
            workers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *inputs["workers"])
        window = jax.tree.map(
            lambda x: x[0], transformer.first_window(jnp.zeros((1, self._states)), self._actions, self.window)
        )
        encoder = self.encoder_net.init(key_encoder, window)
        size = self.code_size + self._states
        actor = self.actor_net.init(key_actor, jnp.zeros((1, size)))
        wide = jnp.zeros((1, size + self._actions))
        critic = jax.vmap(lambda k: self.critic_net.init(k, wide))(jax.random.split(key_critic, self.critics))
        begin = lambda params: optimise.adam().init(optimise.flat(params))  # noqa: E731
        params = CollectiveParameters(
            workers, encoder, actor, critic, begin(encoder), begin(actor), begin(critic), jnp.int32(0)
        )
        shards, envs = self.layout.local_shards, self.layout.num_envs // self.layout.shards
        return AlgoState(params, replay.create(self._seen, self._answer, 1, shards, self.rows, envs))

    def weights(self, state: AlgoState) -> Any:
        """What a student takes: {"encoder", "actor"}."""
        return {name: getattr(state.replicated, name) for name in ("encoder", "actor")}

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
        state = memory.window.state[:, -1]
        noise = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, 0), (self._actions,)))(keys)
        code_of = lambda: self.codes(policy["encoder"], memory.window)  # noqa: E731

        def learner(code: Array) -> Array:
            mean, log_std = self.gaussian(policy["actor"], code, state)
            return jnp.tanh(mean) if mode == "best" else distributions.squashed_normal(mean, log_std, noise)[0]

        def uniform(code: Array) -> Array:
            draw = lambda key: jax.random.uniform(key, (self._actions,), minval=-1.0, maxval=1.0)  # noqa: E731
            return jax.vmap(lambda key: draw(jax.random.fold_in(key, 1)))(keys)

        def worker(code: Array) -> Array:
            mean, log_std = jax.vmap(lambda params: self.worker.gaussian(params, timestep.observation))(
                policy["workers"]
            )
            mean, log_std = (_of_task(x[:, :, 0], timestep.task) for x in (mean, log_std))
            return distributions.squashed_normal(mean, log_std, noise)[0]

        extras: Any = ()
        if mode == "explore":
            done = total(progress.vector_steps)
            stage = jnp.sum(done >= jnp.array(self._until, jnp.float32), dtype=jnp.int32)
            # nobody reads the codes of the workers' steps before the transformer is trained
            code = jax.lax.cond(stage < 2, code_of, lambda: jnp.zeros((len(keys), self.code_size)))
            action = jax.lax.switch(stage, [uniform, learner, worker], code)
            held_out = memory.episode % HELD_OUT == 0
            extras = {"action": action, "code": code, "step": memory.step, "held_out": held_out}
        else:
            action = learner(code_of())
        return action[:, None].astype(self.spec.action.dtype), dataclasses.replace(memory, action=action), extras

    # The labelled set

    def _labels(self, workers: Any, observation: Array, task: Array, noise: Array) -> dict[str, Array]:
        """What each task's worker says of observations [N, D], leaves float32[N, ...]; noise [N, n]."""

        def of(worker: Any) -> dict[str, Array]:
            mean, log_std = self.worker.gaussian(worker["actor"], observation[:, None])
            action, log_prob = distributions.squashed_normal(mean, log_std, noise[:, None])
            values = self.worker.values(worker["critic"], observation[:, None], action).min(0)
            soft = values - jnp.exp(worker["log_alpha"])[None] * log_prob
            return {"mu": jnp.tanh(mean[:, 0]), "log_std": log_std[:, 0], "value": soft[:, 0]}

        return jax.tree.map(lambda x: _of_task(x, task), jax.vmap(of)(workers))

    def _store(self, params: Any, ring: Replay, trajectory: Trajectory, last: TimeStep, key: Array) -> Replay:
        """The trajectory with labels, and the row behind it."""
        step = trajectory.timestep
        steps = len(step.first)
        join = lambda rows, last: jnp.concatenate([rows, last[None].astype(rows.dtype)])  # noqa: E731
        flat = lambda x: x.reshape(*x.shape[:-2], -1).astype(jnp.float32)  # noqa: E731
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, self.layout.env_indices())
        noise = jax.vmap(lambda k: jax.random.normal(k, (steps, self._actions)))(keys).swapaxes(0, 1)

        def label(rows: Any) -> dict[str, Array]:
            shape = rows[1].shape
            merged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
            labels = self._labels(params.workers, *merged)
            return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), labels)

        labels = self.layout.over_envs(label, (flat(step.observation), step.task, noise), axis=1)
        seen = {"observation": join(flat(step.observation), flat(last.observation)), "task": join(step.task, last.task)}
        end = replay.ends(join(step.terminated, last.terminated), join(step.truncated, last.truncated))
        reward = join(step.reward, last.reward)
        return replay.write(ring, seen, trajectory.extras | labels, reward, end)

    def _usable(self, ring: Replay) -> Array:
        """bool[S, R, E]: rows whose successors are complete, too, and that do not end an episode."""
        age = (ring.head[:, None] - jnp.arange(self.rows)[None]) % self.rows
        complete = (age >= 2) & (age <= ring.filled[:, None])
        return complete[:, :, None] & (ring.end == replay.GOES_ON)

    def _windows(self, ring: Replay, index: Array) -> Window:
        """Windows [S, m, ...] that end at rows int32[S, m]."""

        def of_shard(ring: Replay, index: Array) -> Window:
            state, answer = self.states(ring.seen["observation"]), ring.answer
            return transformer.stored_windows(
                state, answer["action"], ring.reward[..., 0], answer["step"], index, self.window
            )

        return jax.vmap(of_shard)(ring, index)

    def _steps(self, ring: Replay, index: Array) -> dict[str, Array]:
        """What actor and critics are fitted to, leaves [S, m, ...]; "target" is the Q label of the step."""

        def of_shard(ring: Replay, index: Array) -> dict[str, Array]:
            at = lambda leaf, index: _at(leaf, index)  # noqa: E731
            names = ("action", "mu", "log_std", "code")
            after = index + ring.end.shape[1]
            goes_on = (at(ring.end, after) != replay.TERMINATED).astype(jnp.float32)
            target = at(ring.reward[..., 0], after) + self.worker.gamma * goes_on * at(ring.answer["value"], after)
            state = self.states(at(ring.seen["observation"], index))
            return {name: at(ring.answer[name], index) for name in names} | {"target": target, "state": state}

        return jax.vmap(of_shard)(ring, index)

    def recording(self, ring: Replay) -> dict[str, np.ndarray]:
        """The set as arrays of NumPy, by the names of `jaxrl.labelled.LabelledSet`, episodes one after another."""
        host = jax.tree.map(np.asarray, ring)
        usable = np.asarray(self._usable(ring)).swapaxes(1, 2)  # [S, E, R]: one environment after another
        shard, env, row = np.nonzero(usable)
        after = (shard, row + 1, env)
        reward, terminated = host.reward[after][:, 0], host.end[after] == replay.TERMINATED
        return {
            "task": host.seen["task"][shard, row, env],
            "step": host.answer["step"][shard, row, env],
            "observation": host.seen["observation"][shard, row, env],
            "action": host.answer["action"][shard, row, env],
            "reward": reward,
            "next_observation": host.seen["observation"][after],
            "terminated": terminated,
            "mu": host.answer["mu"][shard, row, env],
            "log_std": host.answer["log_std"][shard, row, env],
            "value": reward + np.float32(self.worker.gamma) * ~terminated * host.answer["value"][after],
        }

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
        elif phase.name == "critic":
            params, metrics = self._fit(params, ring, key_updates, phase.updates, "critic", self._critic_error)
        elif phase.updates:
            params, metrics = self._fit(params, ring, key_updates, phase.updates, "actor", self._actor_error)
        return AlgoState(params, ring), metrics

    def _actor_error(self, actor: Any, sample: dict[str, Array]) -> Array:
        mean, log_std = self.gaussian(actor, sample["code"], sample["state"])
        return distillation_loss(mean, log_std, sample["mu"], sample["log_std"], sample["weight"])

    def _critic_error(self, critic: Any, sample: dict[str, Array]) -> Array:
        values = self.values(critic, sample["code"], sample["state"], sample["action"])
        return jnp.sum(jnp.mean(sample["weight"][None] * jnp.square(values - sample["target"][None]), axis=1))

    def _fit(
        self, params: Any, ring: Replay, key: Array, updates: int, name: str, error: Any
    ) -> tuple[Any, dict[str, Array]]:
        """Updates of one network, and its error on held-out steps."""
        usable, held_out = self._usable(ring), ring.answer["held_out"]
        rate = self.actor_lr if name == "actor" else self.critic_lr

        def batch(key: Array, sums: Array) -> dict[str, Array]:
            index, weight = self._draw(key, sums, self.batch_size)
            return self._steps(ring, index) | {"weight": weight}

        def loss(network: Any, sample: dict[str, Array]) -> tuple[Array, Any]:
            return error(network, sample), ()

        training = _sums(usable & ~held_out)

        def update(carry: Any, key: Array) -> Any:
            network, optimiser = carry
            gradient, (value, _) = self.layout.gradient(loss, network, batch(key, training))
            network, optimiser, norm = self._descend(gradient, network, optimiser, rate)
            return (network, optimiser), jnp.stack([value, norm])

        key_held_out, key = jax.random.split(key)
        carry = getattr(params, name), getattr(params, f"{name}_optimiser")
        (network, optimiser), table = jax.lax.scan(update, carry, jax.random.split(key, updates))
        checked = batch(key_held_out, _sums(usable & held_out))
        _, (value, _) = self.layout.gradient(loss, network, checked)
        share = jnp.maximum(self.layout.average(checked["weight"]), 1e-6)  # 0 while nothing is held out yet
        metrics = {
            f"{name}_loss": table[:, 0],
            f"{name}_grad_norm": table[:, 1],
            f"{name}_held_out_loss": value / share,
        }
        return dataclasses.replace(params, **{name: network, f"{name}_optimiser": optimiser}), metrics

    def _descend(self, gradient: Any, network: Any, optimiser: Any, rate: float) -> tuple[Any, Any, Array]:
        def step(gradient: Any, network: Any, optimiser: Any) -> Any:
            network, _, optimiser, norm = optimise.descend_flat(
                optimise.adam(), gradient, network, None, optimiser, jnp.float32(rate)
            )
            return network, optimiser, norm

        return self.layout.alone(step)(gradient, network, optimiser)

    def _draw(self, key: Array, sums: Array, number: int) -> tuple[Array, Array]:
        """Rows of all shards, uniform over those that `sums` int32[S, R E] counts: index int32[S, m], weight [S, m].

        The weight is 0 where there is nothing to draw.
        """
        each = number // self.layout.shards

        def of_shard(key: Array, sums: Array) -> tuple[Array, Array]:
            drawn = jax.random.randint(key, (each,), 0, jnp.maximum(sums[-1], 1), jnp.int32)
            index = jnp.searchsorted(sums, drawn, side="right").astype(jnp.int32)
            return jnp.minimum(index, len(sums) - 1), jnp.full(each, sums[-1] > 0, jnp.float32)

        return jax.vmap(of_shard)(self.layout.shard_keys(key), sums)

    # The transformer

    def _train_transformer(self, params: Any, ring: Replay, key: Array, updates: int) -> tuple[Any, dict[str, Array]]:
        """Updates on full windows of training episodes; losses and nearest neighbours of held-out ones."""
        full = self._usable(ring) & (ring.answer["step"] >= self.window - 1)
        held_out = ring.answer["held_out"]
        training, checking = _sums(full & ~held_out), _sums(full & held_out)
        # InfoNCE compares the windows of a batch: all of a device (of a logical shard where bits must not change)
        layout = dataclasses.replace(self.layout, learn_chunk=0)

        def batch(key: Array, sums: Array) -> dict[str, Any]:
            key_rows, key_noise = jax.random.split(key)
            index, _ = self._draw(key_rows, sums, self.transformer_batch)
            keys = jax.vmap(lambda k: jax.random.split(k, index.shape[1]))(layout.shard_keys(key_noise))
            task = jax.vmap(_at)(ring.seen["task"], index)
            return {"window": self._windows(ring, index), "task": task, "key": keys}

        def update(carry: Any, key: Array) -> Any:
            encoder, optimiser = carry
            loss = lambda encoder, sample: self.encoder_loss(encoder, sample, True)  # noqa: E731
            gradient, (_, parts) = layout.gradient(loss, encoder, batch(key, training))
            encoder, optimiser, norm = self._descend(gradient, encoder, optimiser, self.transformer_lr)
            return (encoder, optimiser), parts | {"encoder_grad_norm": norm}

        def check(encoder: Any, sample: dict[str, Any]) -> tuple[Array, dict[str, Array]]:
            loss, parts = self.encoder_loss(encoder, sample, False)
            known, asked = (self.codes(encoder, sample[name]) for name in ("known", "window"))
            return loss, parts | {
                "code_accuracy": neighbour_accuracy(known, sample["known_task"], asked, sample["task"])
            }

        key_known, key_held_out, key = jax.random.split(key, 3)
        carry = params.encoder, params.encoder_optimiser
        (encoder, optimiser), metrics = jax.lax.scan(update, carry, jax.random.split(key, updates))
        known, asked = batch(key_known, training), batch(key_held_out, checking)
        _, (_, parts) = layout.gradient(check, encoder, asked | {"known": known["window"], "known_task": known["task"]})
        metrics |= {f"held_out_{name}": value for name, value in parts.items()}
        return dataclasses.replace(params, encoder=encoder, encoder_optimiser=optimiser), metrics

    def encoder_loss(self, encoder: Any, sample: dict[str, Any], training: bool) -> tuple[Array, dict[str, Array]]:
        """Reconstruction of two masked views and InfoNCE between their codes, of {"window", "task", "key"} [N, ...]."""

        def view(key: Array, window: Window) -> tuple[Array, Window, Window]:
            key_mask, key_dropout = jax.random.split(key)
            hidden, masked = transformer.mask_tokens(key_mask, window)
            rngs = {"dropout": key_dropout} if training and self.dropout else None
            code, predicted = self.encoder_net.apply(encoder, hidden, rngs is not None, rngs=rngs)
            return code, predicted, masked

        codes, error = [], jnp.float32(0)
        for number in range(2):
            keys = jax.vmap(lambda key, number=number: jax.random.fold_in(key, number))(sample["key"])
            code, predicted, masked = jax.vmap(view)(keys, sample["window"])
            error = error + transformer.reconstruction_loss(predicted, sample["window"], masked)
            codes.append(code)
        contrast = transformer.contrastive_loss(codes[0], codes[1], sample["task"], self.temperature)
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


def neighbour_accuracy(known: Array, known_task: Array, asked: Array, task: Array) -> Array:
    """Share of codes float32[N, c] whose nearest known code float32[M, c] (by cosine) is of their task int32[N]."""
    known, asked = (code * jax.lax.rsqrt(jnp.sum(code**2, -1, keepdims=True) + 1e-12) for code in (known, asked))
    nearest = jnp.argmax(asked @ known.T, axis=-1)
    return jnp.mean((known_task[nearest] == task).astype(jnp.float32))


def _check_worker(source: Source, spec: EnvSpec) -> str:
    """The task of a worker. Raises ValueError where it cannot teach in an environment."""
    run, algo = source.run, source.algo
    if not isinstance(algo, Sac):
        raise ValueError(f"{run} was trained with {type(algo).__name__.lower()}: workers are runs of sac")
    if algo.spec.name != spec.name:
        raise ValueError(
            f"{run} was trained on '{algo.spec.name}', not on '{spec.name}': take workers of one environment"
        )
    for what, own, wanted in (
        ("observations", algo.spec.observation, spec.observation), ("actions", algo.spec.action, spec.action)
    ):  # fmt: skip
        if own.shape != wanted.shape:
            raise ValueError(f"{run} has {what} of shape {own.shape}, here they are {wanted.shape}: take other workers")
    for name, value in spec.alike.items():
        if algo.spec.alike[name] != value:
            raise ValueError(
                f"{run} was trained with {name} {algo.spec.alike[name]}, here it is {value}: make it the same"
            )
    names = algo.spec.task_names
    if len(names) != 1:
        raise ValueError(f"{run} was trained on {len(names)} tasks: a worker knows one")
    if names[0] not in spec.task_names:
        raise ValueError(
            f"{run} was trained on '{names[0]}', which is not among the tasks here ({', '.join(spec.task_names)}): "
            "leave it out, or name its task, too"
        )
    return names[0]


def _of_task(values: Array, task: Array) -> Array:
    """[N, ...] of [K, N, ...]: the entry of each sample's task int32[N]."""
    index = task.astype(jnp.int32).reshape(1, -1, *(1,) * (values.ndim - 2))
    return jnp.take_along_axis(values, index, axis=0)[0]


def _at(leaf: Array, index: Array) -> Array:
    """Rows [m, ...] of one shard's leaf [R, E, ...] at index int32[m] into R E."""
    return jnp.take(leaf.reshape(-1, *leaf.shape[2:]), index, axis=0, mode="clip")


def _sums(rows: Array) -> Array:
    """int32[S, R E]: how many rows are wanted up to each one."""
    return jnp.cumsum(rows.reshape(len(rows), -1), axis=1, dtype=jnp.int32)
