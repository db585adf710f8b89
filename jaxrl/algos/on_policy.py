"""Networks, stages, epochs and minibatches of algorithms that learn from a rollout and then discard it.

Layout letters: T steps of a rollout, B environments, A agents, S logical shards, R rows of a logical shard, L steps and
K agents of a row, m rows of a minibatch in one shard. `minibatches` says what a row is.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from envs_jax.base import Array, EnvSpec, TimeStep, pytree
from envs_jax.progress import Progress
from jaxrl.algos.base import Algorithm, AlgoState, Learning, Phase, Stage, Trajectory, setting
from jaxrl.algos.minibatches import Minibatches, pick
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.nn.egocentric import Turn
from jaxrl.nn.networks import MLP, GaussianOutputs, Network
from jaxrl.nn.recurrent import Recurrent
from jaxrl.nn.team_policy import Situation, Sizes, TeamNetwork, message_ages
from jaxrl.nn.teams import Communicating
from jaxrl.rl.data_parallel import jit_inline

Arrays = dict[str, Any]  # arrays by name; "situation" and the carries are pytrees
FEATURES = {  # {setting that turns a feature on: (its value while off, settings that need the feature)}
    "memory": ("none", ("memory_size", "memory_layers")),
    "message_passing": ("none", ("message_heads", "message_layers")),
    "risk_level": (1.0, ("risk_quantiles",)),
}


@pytree
class Prepared:
    """What an algorithm computes from a rollout before it learns, see `OnPolicy.prepare`.

    Attributes:
        params: as the first minibatch finds them.
        data: rows [S local, R, ...] by name, from which minibatches are picked.
        metrics: of the rollout, float32[] by name.
        sharded: the next `AlgoState.sharded`.
    """

    params: Any
    data: Arrays
    metrics: Arrays
    sharded: Any = ()


def check_egocentric(spec: EnvSpec, central: bool, local: str = "") -> None:
    """Raise ValueError where networks cannot have egocentric views.

    Args:
        spec: of the environment.
        central: the critic sees `critic_input`.
        local: begins the remedy where the algorithm also has a critic that sees observations.
    """
    if spec.egocentric is None:
        raise ValueError(f"'{spec.name}' has no egocentric views: use --egocentric false")
    if central and spec.critic_input is None:
        raise ValueError(f"'{spec.name}' has no critic_input, which would be turned: use {local}--egocentric false")


@dataclasses.dataclass(frozen=True)
class OnPolicy(Algorithm):
    """Base of algorithms that learn from each rollout in epochs over minibatches.

    An algorithm defines `updates`, a loss `PART_loss` for each learned part, `prepare`, `steps`, `restarts`,
    `split_rows`, `networks`, `init` and `act`. `AlgoState.replicated` has a Learner for each part, by name.
    """

    num_epochs: int = setting(4, "epochs (passes over the rollout) per iteration", between=(1, 10_000))
    hidden_size: int = setting(128, "channels of the convolutions and units of the dense layers", between=(1, 2**14))
    depth: int = setting(2, "number of hidden dense layers; images pass convolutions first", between=(0, 100))
    initializer: Any = "orthogonal"  # a setting in each subclass, with its own choices
    stride: int = setting(
        1, "stride of the first convolution, pixels; 2 takes a fifth of the arithmetic", between=(1, 100)
    )
    convolution: Literal["auto", "conv", "dense", "patches"] = setting(
        "auto", "how convolutions are computed; auto = the fastest way on the backend"
    )
    memory: Literal["none", "gru", "lstm"] = setting(
        "none",
        "gru, lstm: the actor, and the critic of ppo, remembers earlier steps of the episode; gradients go back to the "
        "start of the rollout, and a minibatch holds whole rollouts",
    )
    memory_size: int = setting(128, "units of each layer of the memory", between=(1, 2**14))
    memory_layers: int = setting(1, "layers of the memory", between=(1, 100))
    message_passing: Literal["none", "attention"] = setting(
        "none", "attention: in each step, an agent's actor attends to the messages that reach it"
    )
    message_heads: int = setting(4, "heads of the attention", between=(1, 1000))
    message_layers: int = setting(2, "layers of the attention within one exchange of messages", between=(1, 100))
    share_parameters: bool = setting(True, "one network for all agents; false: one for each agent, or type of agent")
    egocentric: bool = setting(
        False, "show networks the view from the agent, in which symmetric situations look alike; for environments that "
        "define it, such as coverage",
    )  # fmt: skip

    # The stages of an epoch in order, and the parts that one step on a minibatch of each changes.
    updates: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    parts: ClassVar[tuple[str, ...]] = ("actor", "critic")
    memory_parts: ClassVar[tuple[str, ...]] = ("actor",)  # the parts that are recurrent with `memory`
    weighs_agents: ClassVar[bool] = True
    compatible_settings: ClassVar[tuple[str, ...]] = (
        "egocentric", "memory", "message_passing", "message_heads", "share_parameters",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in self.custom.networks:
            if self._has_layers(part):
                kind = "memory" if self.has_memory else "message_passing"
                raise ValueError(
                    f"your own network '{part}' cannot be combined with {kind}: use --{kind} none, or leave it out of "
                    "networks"
                )
        if not self.passes_messages:
            return
        if self.spec.num_agents == 1:
            raise ValueError(
                f"message_passing is for teams, and '{self.spec.name}' has one agent: use --message_passing none"
            )
        if self.hidden_size % self.message_heads:
            raise ValueError(
                f"message_heads {self.message_heads} does not divide hidden_size {self.hidden_size}, the size of a "
                "message: change one of them"
            )
        if not self.depth:
            raise ValueError("messages come from the last hidden layer, and depth 0 has none: use --depth 1 or more")

    def warnings(self, total_env_steps: int) -> list[str]:
        del total_env_steps
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return [
            f"{name} {getattr(self, name)} has no effect without {feature}: set --{feature} too"
            for feature, (off, names) in FEATURES.items()
            if getattr(self, feature, None) == off
            for name in names
            if getattr(self, name) != defaults[name]
        ]

    # To define, besides the losses

    @property
    def steps(self) -> int:
        """Steps of a rollout, T."""
        raise NotImplementedError("an on-policy algorithm needs `steps`")

    @property
    def restarts(self) -> bool:
        """Whether each rollout begins with fresh episodes."""
        raise NotImplementedError("an on-policy algorithm needs `restarts`")

    def split_rows(self, rows: int, row_samples: int) -> tuple[int, int]:
        """Return minibatches per epoch and their size m, from R = `rows` rows of `row_samples` samples."""
        raise NotImplementedError("an on-policy algorithm needs split_rows(rows, row_samples)")

    def prepare(
        self, state: AlgoState, trajectory: Trajectory, last: TimeStep, key: Key, progress: Progress
    ) -> Prepared:
        """Return what is learned from a rollout, such as targets, once for all epochs.

        Args:
            state: before this rollout is learned from.
            trajectory: the rollout, leaves [T, B local, ...].
            last: the time step after it, leaves [B local, ...].
            key: for random numbers; `shuffle_keys` gets the same one.
            progress: before this training step.
        """
        raise NotImplementedError("an on-policy algorithm needs prepare(state, trajectory, last, key, progress)")

    # To override where needed

    def first_epoch(self, stage: str) -> int:
        """Return the first epoch that has a stage."""
        del stage
        return 0

    def shuffle_keys(self, key: Key) -> Key:
        """Return the keys of the shuffles, key[num_epochs]."""
        return jax.random.split(key, self.num_epochs)

    def move_targets(self, params: Any, stage: str, index: Array) -> Any:
        """Move target networks before minibatch `index` int32[] of a stage; return the parameters."""
        del stage, index
        return params

    def extend_minibatch(self, params: Any, stage: str, minibatch: Arrays, progress: Progress) -> Arrays:
        """Return a minibatch with what the stage's losses need of all its rows, such as a deviation."""
        del params, stage, progress
        return minibatch

    def decide_step(self, stage: str, metrics: Arrays, progress: Progress) -> tuple[Array | None, Arrays]:
        """Return whether a stage takes its step, bool[], None for always; and metrics, from the losses' metrics."""
        del stage, progress
        return None, metrics

    def evaluate_minibatch(self, params: Any, stage: str, minibatch: Arrays) -> Arrays:
        """Return rows [S, m, ...] by name that later stages of the epoch read, from the parameters after the step."""
        del params, stage, minibatch
        return {}

    def finish(self, params: Any, data: Arrays) -> Any:
        """Return the parameters after the last minibatch."""
        del data
        return params

    # One step on a minibatch

    def update(self, stage: str, params: Any, minibatch: Arrays, progress: Progress) -> tuple[Any, Arrays, Arrays]:
        """Take a step on the sum of a stage's losses, whose parts share no parameters.

        `PART_loss(learned, params, minibatch, progress)` returns a part's loss, the mean over a minibatch's rows [N, L,
        K, ...], and metrics; `learned` is what is differentiated.

        Returns:
            parameters, what `evaluate_minibatch` returns, metrics.
        """
        minibatch = self.extend_minibatch(params, stage, minibatch, progress)

        def loss(learned: dict[str, Params], rows: Arrays) -> tuple[Array, Arrays]:
            losses: list[Array] = []
            metrics: Arrays = {}
            for part, part_params in learned.items():
                part_loss, part_metrics = getattr(self, f"{part}_loss")(part_params, params, rows, progress)
                losses.append(part_loss)
                metrics |= {f"{part}_loss": part_loss} | part_metrics
            return sum(losses[1:], losses[0]), metrics

        learners = {part: getattr(params, part) for part in self.updates[stage]}
        learned = {part: learner.params for part, learner in learners.items()}
        gradient, (_, metrics) = self.layout.gradient(loss, learned, minibatch, self.batches.row_samples)
        active, metrics = self.decide_step(stage, metrics, progress)
        for part, learner in learners.items():
            learner, norm = self.step(part, learner, gradient[part], progress, active)
            params = dataclasses.replace(params, **{part: learner})
            metrics |= {f"{part}_grad_norm": norm}
        return params, self.evaluate_minibatch(params, stage, minibatch), metrics

    @functools.cached_property
    def jitted_updates(self) -> dict[str, Callable[..., Any]]:
        """`update` of each stage, traced once for the shapes of its results and for its call."""
        return {stage: jit_inline(functools.partial(self.update, stage)) for stage in self.updates}

    # An iteration

    @property
    def phases(self) -> tuple[Phase, ...]:
        """One phase: roll out, then learn from the rollout and discard it."""
        return (Phase("train", self.steps, self.num_epochs * self.batches.per_epoch, restart=self.restarts),)

    @property
    def learn_stages(self) -> tuple[Stage, ...]:
        """The stages of each epoch, whose steps are minibatches."""
        return tuple(
            Stage(stage, epoch, self.batches.per_epoch)
            for epoch in range(self.num_epochs)
            for stage in self.updates
            if epoch >= self.first_epoch(stage)
        )

    def begin_learning(
        self, state: AlgoState, trajectory: Trajectory, last_timestep: TimeStep, key: Key, progress: Progress
    ) -> Learning:
        """Prepare the rollout, and shuffle its rows for each epoch."""
        prepared = self.prepare(state, trajectory, last_timestep, key, progress)
        order = self.batches.shuffle(self.shuffle_keys(key))
        # the shapes of what each stage evaluates and reports, for their buffers
        minibatch = jax.eval_shape(pick, prepared.data, order[:, 0, 0])
        evaluated: dict[str, Arrays] = {}
        metrics: dict[str, Arrays] = {}
        for stage, update in self.jitted_updates.items():
            _, rows, stage_metrics = jax.eval_shape(update, prepared.params, minibatch, progress)
            evaluated[stage] = {
                name: jnp.zeros((x.shape[0], self.batches.per_epoch, *x.shape[1:]), x.dtype) for name, x in rows.items()
            }
            updates = (self.num_epochs - self.first_epoch(stage)) * self.batches.per_epoch
            metrics[stage] = {name: jnp.zeros(updates, jnp.float32) for name in stage_metrics}
            minibatch = minibatch | rows
        data = prepared.data | {"order": order}
        return Learning(data, (prepared.sharded, evaluated), (prepared.params, metrics, prepared.metrics))

    def learn_step(self, learning: Learning, stage: str, epoch: Array, index: Array, progress: Progress) -> Learning:
        """Run a stage on minibatch `index`, with what earlier stages of the epoch evaluated on it."""
        sharded, evaluated = learning.sharded
        params, metrics, rollout_metrics = learning.replicated
        data = dict(learning.data)
        minibatch = pick(data, data.pop("order")[:, epoch, index])
        for earlier in itertools.takewhile(lambda name: name != stage, self.updates):
            minibatch |= {name: rows[:, index] for name, rows in evaluated[earlier].items()}
        params = self.move_targets(params, stage, index)
        params, rows, step_metrics = self.jitted_updates[stage](params, minibatch, progress)
        kept = {name: all_rows.at[:, index].set(rows[name]) for name, all_rows in evaluated[stage].items()}
        step = (epoch - self.first_epoch(stage)) * self.batches.per_epoch + index
        shown = {name: values.at[step].set(step_metrics[name]) for name, values in metrics[stage].items()}
        changed = params, metrics | {stage: shown}, rollout_metrics
        return Learning(learning.data, (sharded, evaluated | {stage: kept}), changed)

    def end_learning(self, learning: Learning) -> tuple[AlgoState, Arrays]:
        """Return the new state, and the metrics of all stages and of the rollout."""
        params, metrics, rollout_metrics = learning.replicated
        sharded, _ = learning.sharded
        by_name = {name: values for stage in metrics.values() for name, values in stage.items()}
        return AlgoState(self.finish(params, learning.data), sharded), by_name | rollout_metrics

    # Rows of a rollout

    @functools.cached_property
    def batches(self) -> Minibatches:
        """The minibatches of a rollout."""
        row_steps = self.steps if self.recurrent else 1
        row_agents = self.spec.num_agents if self._keeps_teams else 1
        samples = self.layout.num_envs // self.layout.shards * self.steps * self.spec.num_agents
        rows = samples // (row_steps * row_agents)
        per_epoch, size = self.split_rows(rows, row_steps * row_agents)
        return Minibatches(self.layout, self.spec.num_agents, row_steps, row_agents, rows, per_epoch, size)

    @property
    def gradient_samples(self) -> int:
        return self.batches.size * self.batches.row_samples

    def cut_rollout(self, trajectory: Trajectory) -> Arrays:
        """Return the rows [S local, R, L, K, ...] of a rollout.

        They are "observation", "action", extras of acting, "weight", and for networks "situation" [S local, R, L, ...]
        and the actor's "carry" before each row [S local, R, K, ...], where it is stored.
        """
        samples = {
            "observation": trajectory.timestep.observation,
            "action": trajectory.action,
            **trajectory.extras,
            "weight": self.batches.sample_weights(trajectory),
        }
        rows = {name: self.batches.cut(x) for name, x in samples.items()}
        situation = self.batches.cut_teams(self.situation(trajectory.timestep))
        carry = self.layout.split(jax.tree.map(lambda x: x[0], trajectory.carry))
        return rows | {"situation": situation, "carry": carry}

    # Networks

    def situation(self, timestep: TimeStep) -> Situation:
        """Return the situation of time steps [N, T, ...], or with any two leading axes."""
        first = timestep.first if self.recurrent else ()
        return Situation(first, message_ages(self.spec, timestep) if self.passes_messages else ())

    def start_carry(self, part: str) -> Any:
        """Return the empty carry of a part for all environments, leaves [S local, B / S, A, ...], () without one."""
        teams = self.layout.local_shards, self.layout.num_envs // self.layout.shards, self.spec.num_agents
        return self.networks[part].zero_carry(*teams)

    def run_actor(self, actor: Params, views: Array, timestep: TimeStep, carry: Any) -> tuple[Array, Any]:
        """Return the actor's outputs float32[B, A, n] for views [B, A, ...] of a time step, and its next carry."""
        situation = self.situation(jax.tree.map(lambda x: x[:, None], timestep))
        outputs, carry = self.networks["actor"].apply_team(actor, views[:, None], situation, carry)
        return outputs[:, 0], carry

    def find_last_carry(self, actor: Params, rows: Arrays) -> Any:
        """Return the actor's carry after rollouts that begin with episodes, leaves [S local, B / S, A, ...]."""
        network = self.networks["actor"]
        if not self.recurrent:
            return ()

        def run(rows: Arrays) -> Any:
            carry = network.zero_carry(len(rows["observation"]), self.spec.num_agents)
            return network.apply_team(actor, rows["observation"], rows["situation"], carry)[1]

        rows = {name: rows[name] for name in ("observation", "situation")}
        return self.layout.apply(run, rows, self.batches.row_samples)

    def init_carry(self, policy_params: PolicyParams, timestep: TimeStep, indices: Array) -> Any:
        """Return the actor's empty carry, leaves float32[B, A, ...]."""
        return self.networks["actor"].zero_carry(*timestep.observation.shape[:2])

    @property
    def networks(self) -> dict[str, TeamNetwork]:  # type: ignore[override]
        """The networks by part, see `make_team_network`."""
        return {}

    def make_turn(self, per_action: bool) -> Turn | None:
        """Return what makes a network's input from a view, see `egocentric`; None: networks see views as they are."""
        turn = self.spec.egocentric if self.egocentric else None
        if turn is None or per_action:
            return turn
        return lambda view: (turn(view)[0], None)

    def make_team_network(
        self,
        part: str,
        outputs: int,
        shape: tuple[int, ...],
        image: bool = True,
        deviation: float | None = None,
        per_action: bool = True,
    ) -> TeamNetwork:
        """Return the network of a part for inputs of a shape, with all that the settings ask for.

        Args:
            part: such as "actor".
            outputs: numbers for each sample; with an initial `deviation` half of them are deviations.
            shape: of one agent's input, before it is turned.
            image: whether an input (H, W, C) passes convolutions, and is not flattened.
            deviation: of Gaussian outputs.
            per_action: whether the last outputs belong to the actions, which `egocentric` views turn, too.
        """
        turn = self.make_turn(per_action)
        if turn is not None:
            shape = jax.eval_shape(turn, jax.ShapeDtypeStruct(shape, jnp.float32))[0].shape
        dtype = self.layout.compute_dtype
        sizes = Sizes(self.hidden_size, self.depth, self.initializer, self.stride, self.convolution, dtype)
        numbers = outputs if deviation is None else outputs // 2
        seen = shape if image else (math.prod(shape),)

        def finish(module: Any) -> Any:
            return module if deviation is None else GaussianOutputs(module, numbers, deviation)

        if self._has_layers(part):
            encoder = sizes.make_network(0, seen)
            head = finish(MLP(numbers, self.hidden_size, 0, self.initializer, dtype))
            network = Network(self._add_layers(part, encoder, head), ((1, 1, *shape),))
        else:
            network = self.make_network(part, outputs, lambda _: finish(sizes.make_network(numbers, seen)), (1, *shape))
        members = 0 if self.types is None else max(self.types) + 1
        return TeamNetwork(network.module, network.inputs, members, self.types, turn, self._message_delay)

    def _add_layers(self, part: str, encoder: Any, head: Any) -> Any:
        """Return a memory, messages or both between an encoder and a head."""
        dtype = self.layout.compute_dtype
        memory = self.memory, self.memory_size, self.memory_layers, self.initializer, dtype
        if part != "actor" or not self.passes_messages:
            return Recurrent(encoder, head, *memory)
        core = Recurrent(None, head, *memory) if self.has_memory else head
        return Communicating(encoder, core, self.message_heads, self.message_layers, self.initializer, dtype)

    @classmethod
    def keeps_rollouts(cls, spec: EnvSpec, settings: dict[str, Any]) -> bool:
        """Return whether minibatches hold whole rollouts, see `recurrent`."""
        delayed = settings.get("message_passing", "none") != "none" and spec.max_link_age > 0
        return settings.get("memory", "none") != "none" or delayed

    @property
    def has_memory(self) -> bool:
        return self.memory != "none"

    @property
    def passes_messages(self) -> bool:
        return self.message_passing != "none"

    @property
    def recurrent(self) -> bool:
        """Whether acting needs a carry: a memory, or messages that are under way."""
        return self.has_memory or self._message_delay > 0

    @property
    def types(self) -> tuple[int, ...] | None:
        """Which parameters each agent has, None where all share them."""
        if self.share_parameters or self.spec.num_agents == 1:
            return None
        return self.spec.agent_types or tuple(range(self.spec.num_agents))

    @property
    def _message_delay(self) -> int:
        return self.spec.max_link_age if self.passes_messages else 0

    @property
    def _keeps_teams(self) -> bool:
        """Whether the networks of a team depend on each other or differ, so that minibatches hold whole teams."""
        return self.recurrent or self.passes_messages or self.types is not None

    def _has_layers(self, part: str) -> bool:
        """Return whether a part's network has a memory or messages."""
        return (self.has_memory and part in self.memory_parts) or (self.passes_messages and part == "actor")
