"""The collective network: one policy for the tasks of several workers, conditioned on a task code.

Workers (SAC, one per task) label the states visited by random actions, by the learner and by themselves, so that
the learner is trained on its own state distribution (DAgger, Ross et al. 2011, arXiv 1011.0686). A transformer encodes
the last steps into a task code (`transformer`); actor and critics of code and state are then fitted to the labels.
Stages, losses and sizes are taken from the published collective-learning pipeline
(argator18/A-transformer-based-collective-learning-framework-for-scalable-knowledge-accumulation-and-transfer), except:

* value labels are Q of the step itself, by the workers' critics instead of their target critics;
* one learner acts in all tasks and becomes the final actor, where the original has a temporary one for each task;
* the transformer learns from the same dataset as the actor, not from the workers' training data;
* an environment begins at a random task and goal before it takes them in order (with --goals order of reach);
* codes are computed once when the transformer is frozen, not at every update.

Expert datasets from elsewhere may replace workers, or be added to the data collected with them. Settings and phases are
in `phases`; here follow losses, learning, acting and state. Labels are made in `workers`, rows are drawn in `dataset`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import Array, TimeStep
from envs_jax.progress import start, total
from jaxrl.algos.base import AlgoState, Learner, Mode, Phase, Progress, Trajectory
from jaxrl.algos.collective import dataset, transformer
from jaxrl.algos.collective.networks import Carry, CollectiveParameters, Networks, distillation_loss
from jaxrl.algos.collective.phases import TRAINED, CollectivePhases
from jaxrl.algos.collective.transformer import CodeBatch, TrajectoryTransformer, Window
from jaxrl.algos.collective.workers import Experts
from jaxrl.algos.sac import Sac
from jaxrl.common.types import Key, Params, PolicyParams
from jaxrl.nn import distributions, optimizers
from jaxrl.nn.networks import MLP
from jaxrl.rl import replay
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.rl.replay import Replay

if TYPE_CHECKING:
    import optax

Arrays = dict[str, Array]

# Layout letters besides T, B, S: K workers, N samples, n action dims, c code dims, R rows of the dataset.


@dataclasses.dataclass(frozen=True)
class Collective(CollectivePhases):
    """One policy for the tasks of several workers, conditioned on a task code of the last steps."""

    modes: ClassVar[tuple[Mode, ...]] = ("greedy", "sample", "zero_code")

    def to_dataset(self, recording: dict[str, Any]) -> dict[str, np.ndarray]:
        return dataset.to_dataset(recording, self.tasks, self.labelled_rows, self.layout)

    # Losses

    def encoder_loss(self, encoder: Params, sample: dict[str, Any], training: bool = True) -> tuple[Array, Arrays]:
        """Return the reconstruction of two masked views of each window, plus InfoNCE between their codes.

        sample: {"window", "task", "key", "weight"} [N, ...]; weight 0 marks an invalid window.
        """
        net = self.model.encoder
        dropping = training and net.dropout > 0

        def view(key: Key, window: Window) -> tuple[Array, Window, Window]:
            key_mask, key_dropout = jax.random.split(key)
            hidden, masked = transformer.mask_tokens(key_mask, window)
            out: Any = net.apply(encoder, hidden, dropping, rngs={"dropout": key_dropout} if dropping else None)
            return *out, masked

        def masked_view(view_index: Array) -> tuple[Array, Array]:
            keys = jax.vmap(lambda key: jax.random.fold_in(key, view_index))(sample["key"])
            code, predicted, masked = jax.vmap(view)(keys, sample["window"])
            masked = jax.tree.map(lambda hit: hit & (sample["weight"] > 0)[:, None], masked)
            return code, transformer.reconstruction_loss(predicted, sample["window"], masked, self.layout.device_mean)

        codes, errors = jax.vmap(masked_view)(jnp.arange(2, dtype=jnp.int32))
        error = errors.sum()
        views = [CodeBatch(code, sample["task"], sample["weight"]) for code in codes]
        others = self.layout.all_gather(views[1])
        contrast = transformer.contrastive_loss(views[0], *others, self.temperature, self.layout.device_mean)
        return error + self.contrast_weight * contrast, {"reconstruction": error, "contrast": contrast}

    def held_out_encoder_loss(self, encoder: Params, sample: dict[str, Any]) -> tuple[Array, Arrays]:
        """Return the loss without dropout, and the share of windows whose nearest neighbour has the same task.

        sample: as above, of held-out windows, and {"known", "known_task", "known_weight"}, as many of the others.
        """
        loss, means = self.encoder_loss(encoder, sample, training=False)
        windows = jax.tree.map(lambda *x: jnp.concatenate(x), sample["known"], sample["window"])
        known, query = jnp.split(self.model.codes(encoder, windows), 2)
        known_codes, _ = self.layout.all_gather(CodeBatch(known, sample["known_task"], sample["known_weight"]))
        query_codes = CodeBatch(query, sample["task"], sample["weight"])
        accuracy = transformer.neighbour_accuracy(known_codes, query_codes, self.layout.device_mean)
        return loss, means | {"code_accuracy": accuracy}

    def actor_loss(self, actor: Params, sample: Arrays) -> tuple[Array, Arrays]:
        """Return `distillation_loss` of labelled steps {"code", "state", "mu", "log_std", "weight"} [N, ...]."""
        mean, log_std = self.model.gaussian(actor, sample["code"], sample["state"])
        return distillation_loss(mean, log_std, sample["mu"], sample["log_std"], sample["weight"]), {}

    def critic_loss(self, critic: Params, sample: Arrays) -> tuple[Array, Arrays]:
        """Return the mean squared errors of all critics at {"code", "state", "action", "value", "weight"} [N, ...]."""
        values = self.model.values(critic, sample["code"], sample["state"], sample["action"])
        return jnp.sum(jnp.mean(sample["weight"][None] * jnp.square(values - sample["value"][None]), axis=1)), {}

    # Learning

    def learn(
        self,
        state: AlgoState,
        trajectory: Trajectory | None,
        last_timestep: TimeStep | None,
        key: Key,
        progress: Progress,
        phase: Phase,
    ) -> tuple[AlgoState, Arrays]:
        """Label and store the collected steps, then run the phase's updates."""
        params, buffer = state.replicated, state.sharded
        metrics: Arrays = {}
        key_labels, key_updates = jax.random.split(key)
        if trajectory is not None and last_timestep is not None:
            buffer = self.experts.store(params.workers, buffer, trajectory, last_timestep, key_labels)
        if phase.name == "codes":
            codes = functools.partial(self.model.codes, params.learners["encoder"].params)
            rows = jnp.minimum(params.coded, self.rows - self.coded_rows) + jnp.arange(self.coded_rows, dtype=jnp.int32)
            buffer = dataset.encode(buffer, rows, codes, self.model.states, self.context_length, self.layout)
            params = dataclasses.replace(params, coded=params.coded + self.coded_rows)
        elif phase.updates:
            network = TRAINED[phase.name]
            fit = self.fit_encoder if network == "encoder" else functools.partial(self.fit, network)
            learner, metrics = fit(params, buffer, key_updates, phase.updates)
            params = dataclasses.replace(params, learners=params.learners | {network: learner})
        return AlgoState(params, buffer), metrics

    def fit(
        self, network: str, params: CollectiveParameters, buffer: Replay, key: Key, updates: int
    ) -> tuple[Learner, Arrays]:
        """Update "actor" or "critic" on labelled steps with a code; also return its error on held-out ones."""
        row = jnp.arange(self.rows, dtype=jnp.int32)[None, :, None]
        coded = (row >= self.labelled_rows) | (row < params.coded)  # only rows of expert datasets are stored without
        usable = dataset.find_usable(buffer) & coded
        held_out = buffer.action["held_out"]
        loss = self.actor_loss if network == "actor" else self.critic_loss

        def draw(key: Key, counts: Array) -> Arrays:
            index, weight = dataset.draw(key, counts, self.batch_size, self.layout)
            return dataset.gather_samples(buffer, index, self.model.states) | {"weight": weight}

        key_held_out, key = jax.random.split(key)
        training = dataset.count_up(usable & ~held_out)
        keys = jax.random.split(key, updates)
        learner, metrics = self._train(network, params, loss, self.layout, lambda key: draw(key, training), keys)
        held_out_batch = draw(key_held_out, dataset.count_up(usable & held_out))
        _, (value, _) = self.layout.gradient(loss, learner.params, held_out_batch)
        share = jnp.maximum(self.layout.sample_mean(held_out_batch["weight"]), 1e-6)  # 0 while nothing is held out yet
        return learner, metrics | {f"{network}_held_out_loss": value / share}

    def fit_encoder(
        self, params: CollectiveParameters, buffer: Replay, key: Key, updates: int
    ) -> tuple[Learner, Arrays]:
        """Update the transformer on full windows of training episodes; also return `held_out_encoder_loss`."""
        full = dataset.find_usable(buffer) & (buffer.action["step"] >= self.context_length - 1)
        held_out = buffer.action["held_out"]
        training, checking = dataset.count_up(full & ~held_out), dataset.count_up(full & held_out)
        # InfoNCE compares the windows of a batch: all of them
        layout = dataclasses.replace(self.layout, learn_chunk=0)

        def draw(key: Key, counts: Array) -> dict[str, Any]:
            key_rows, key_noise = jax.random.split(key)
            index, weight = dataset.draw(key_rows, counts, self.transformer_batch, layout)
            keys = jax.vmap(lambda k: jax.random.split(k, index.shape[1]))(layout.shard_keys(key_noise))
            window = dataset.gather_windows(buffer, index, self.model.states, self.context_length)
            task = dataset.take_rows(buffer.observation["task"], index)
            return {"window": window, "task": task, "key": keys, "weight": weight}

        key_known, key_held_out, key = jax.random.split(key, 3)
        keys = jax.random.split(key, updates)
        loss = self.encoder_loss
        learner, metrics = self._train("encoder", params, loss, layout, lambda key: draw(key, training), keys)
        known, queries = draw(key_known, training), draw(key_held_out, checking)
        known = {"known": known["window"], "known_task": known["task"], "known_weight": known["weight"]}
        _, (_, means) = layout.gradient(self.held_out_encoder_loss, learner.params, queries | known)
        return learner, metrics | {f"held_out_{name}": value for name, value in means.items()}

    def _train(
        self,
        network: str,
        params: CollectiveParameters,
        loss: Callable[..., tuple[Array, Arrays]],
        layout: DataParallel,
        draw: Callable[[Key], Any],
        keys: Key,
    ) -> tuple[Learner, Arrays]:
        """Take one optimizer step per key, on the samples [S local, m, ...] that `draw` returns for it."""

        def update(learner: Learner, key: Key) -> tuple[Learner, Arrays]:
            gradient, (value, means) = layout.gradient(loss, learner.params, draw(key))
            learner, norm = self.step(network, learner, gradient, start())
            return learner, {f"{network}_loss": value, f"{network}_grad_norm": norm, **means}

        return jax.lax.scan(update, params.learners[network], keys)

    def chain(self, part: str) -> "optax.GradientTransformation":
        """Return the optimizer of a network, whose steps shrink linearly over all of its updates."""
        steps = max(self.count_updates(part), 1)
        return optimizers.decay_linearly(self.optimizer(part), self.final_lr_fraction, steps)

    def learning_rate(self, part: str, progress: Progress) -> Array:
        rates = {"encoder": self.transformer_lr, "actor": self.actor_lr, "critic": self.critic_lr}
        return jnp.float32(rates[part])

    # Acting

    def init_carry(self, policy_params: PolicyParams, timestep: TimeStep, indices: Array) -> Carry:
        state = self.model.states(timestep.observation.reshape(len(indices), -1))
        window = self.model.first_window(state)
        return Carry(window, jnp.zeros((len(indices), self._actions), jnp.float32), jnp.zeros_like(indices), indices)

    def observe(self, carry: Carry, timestep: TimeStep) -> Carry:
        """Return the carry after observing a time step [B], before acting on it (`action` is the previous one)."""
        state = self.model.states(timestep.observation.reshape(len(carry.step), -1))
        first = timestep.first
        return dataclasses.replace(
            carry,
            window=transformer.next_window(carry.window, state, carry.action, timestep.reward[:, 0], first),
            step=jnp.where(first, 0, carry.step + 1),
            episode=carry.episode + first.astype(jnp.int32),
        )

    def act(
        self, policy_params: PolicyParams, carry: Any, timestep: TimeStep, keys: Key, progress: Progress, mode: Mode
    ) -> tuple[Array, Any, Any]:
        """Select actions: in training by the phase's actor, in evaluation by the collective ("greedy": tanh(mean))."""
        carry = self.observe(carry, timestep)
        noise = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, 0), (self._actions,), jnp.float32))(keys)

        def uniform() -> Array:
            keys_uniform = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
            return jax.vmap(lambda key: jax.random.uniform(key, (self._actions,), jnp.float32, -1.0, 1.0))(keys_uniform)

        extras: Any = ()
        if mode == "explore":
            done = total(progress.vector_steps)
            stage = jnp.sum(done >= jnp.array(self.until, jnp.float32), dtype=jnp.int32)
            # codes of the workers' steps are not used before the transformer is trained
            code = jax.lax.cond(
                stage < 2,
                lambda: self.model.codes(policy_params["encoder"], carry.window),
                lambda: jnp.zeros((len(keys), self.code_size), jnp.float32),
            )

            def learner() -> Array:
                gaussian = self.model.gaussian(policy_params["actor"], code, carry.window.state[:, -1])
                return distributions.squashed_normal(*gaussian, noise)[0]

            worker = functools.partial(self.experts.act, policy_params["workers"], timestep, noise)
            action = jax.lax.switch(stage, [uniform, learner, worker])
            held_out = carry.episode % dataset.HELD_OUT == 0
            extras = {"action": action, "code": code, "step": carry.step, "held_out": held_out}
        else:
            mean, log_std = self.model.action_distribution(policy_params, carry.window, mode == "zero_code")
            action = distributions.squashed_normal(mean, log_std, noise)[0] if mode == "sample" else jnp.tanh(mean)
        return action[:, None].astype(self.spec.action.dtype), dataclasses.replace(carry, action=action), extras

    # State and networks

    def init(self, key: Key, inputs: Any) -> AlgoState:
        """Return fresh networks and a dataset that holds only the expert datasets.

        `inputs` may hold "workers", weights of each in the order of the tasks, and "expert_datasets", from
        `to_dataset`. Without inputs the workers are fresh too, which is enough for shapes.
        """
        key_workers, key = jax.random.split(key)
        worker_weights = (inputs or {}).get("workers")
        if worker_weights:
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *worker_weights)
        else:
            worker = self.experts.worker
            stacked = jax.vmap(lambda key: worker.weights(worker.init(key, None)))(
                jax.random.split(key_workers, max(self.num_workers, 1))
            )
        learners = {name: self.learner(name, network) for name, network in self.model.init(key).items()}
        params = CollectiveParameters(workers=stacked, learners=learners, coded=jnp.int32(0))
        shards = self.layout.local_shards
        envs = self.layout.num_envs // self.layout.shards
        buffer = replay.create(*self._row_shapes, 1, shards, self.rows, envs)
        if inputs and "expert_datasets" in inputs:
            buffer = dataset.fill(buffer, inputs["expert_datasets"], self.layout)
        return AlgoState(params, buffer)

    def weights(self, state: AlgoState) -> Params:
        """Return the parameters for `Networks.action_distribution`, which a student needs too."""
        return {name: state.replicated.learners[name].params for name in ("encoder", "actor")}

    def policy(self, state: AlgoState) -> PolicyParams:
        """Return the parameters of `weights` and the workers, which act while their data are collected."""
        return self.weights(state) | {"workers": state.replicated.workers["actor"]}

    @functools.cached_property
    def model(self) -> Networks:
        states = len(self.state_entries) or math.prod(self.spec.observation.shape)
        dtype = self.layout.compute_dtype
        encoder = TrajectoryTransformer(
            states, self._actions, self.code_size, self.context_length, self.embedding_size, self.feedforward_size,
            self.num_heads, self.num_layers, self.dropout, dtype,
        )  # fmt: skip
        actor, critic = (MLP(size, self.hidden_size, self.depth, "xavier", dtype) for size in (2 * self._actions, 1))
        return Networks(encoder, actor, critic, self.num_critics, self.state_entries)

    @functools.cached_property
    def experts(self) -> Experts:
        """The workers; their replay and minibatches are as small as allowed."""
        spec = dataclasses.replace(self.spec, num_tasks=1, task_names=())
        envs = self.layout.num_envs
        sizes = {"batch_size": self.layout.shards, "buffer_size": 4 * envs, "env_steps_per_update": envs}
        return Experts(Sac(spec, self.layout, **self._resolved["worker"] | sizes), self.spec.num_tasks)
