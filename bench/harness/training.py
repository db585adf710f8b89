"""An iteration of training, whole and in parts: its FLOP, its programs, and samplers of their seconds."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bench.harness import flops
from bench.harness.timing import Sampler, stopwatch
from envs_jax.progress import start
from jaxrl.algos.base import Algorithm, Phase
from jaxrl.rl.data_parallel import AXIS, REPLICATED, SPLIT, compiler_options, on_mesh, shardings
from jaxrl.runtime.build import Run

# Counting


def measured_phase(algo: Algorithm) -> Phase:
    """Return the phase that training spends its time in: the last one that both steps and learns."""
    return [phase for phase in algo.phases if phase.steps and phase.updates][-1]


def _plain(algo: Algorithm) -> Algorithm:
    """Return the algorithm for counting: without devices, and without products that waste work to save time."""
    changes: dict[str, Any] = {"layout": dataclasses.replace(algo.layout, devices=1)}
    if any(field.name == "convolution" for field in dataclasses.fields(algo)):
        changes["convolution"] = "conv"
    return dataclasses.replace(algo, **changes)


def learning_flop(run: Run) -> float:
    """Count the FLOP of one call of `learn` on all devices together."""
    algo = _plain(run.algo)
    phase = measured_phase(run.algo)
    trainer = run.trainer
    state = run.trainer.shapes()
    key = jax.eval_shape(lambda: jax.random.key(0))
    progress = jax.eval_shape(start)

    def collect(state: Any, key: Any) -> Any:
        return trainer.rollout(state, phase, key)[:2]

    collected = PartitionSpec(None, AXIS), SPLIT
    arguments = trainer.specs(), REPLICATED
    trajectory, last = jax.eval_shape(on_mesh(collect, run.mesh, arguments, collected), state, key)

    if not algo.learn_stages:

        def learn(state: Any, trajectory: Any, last: Any, key: Any, progress: Any) -> Any:
            return algo.learn(state, trajectory, last, key, progress, phase)

        return flops.count(learn, state.algo, trajectory, last, key, progress)

    # Stages run in loops whose length is an argument, so that their steps are counted one by one.
    learn_inputs = state.algo, trajectory, last, key, progress
    learning = jax.eval_shape(algo.begin_learning, *learn_inputs)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    flop = flops.count(algo.begin_learning, *learn_inputs) + flops.count(algo.end_learning, learning)
    for stage in algo.learn_stages:

        def step(learning: Any, epoch: Any, index: Any, progress: Any, name: str = stage.name) -> Any:
            return algo.learn_step(learning, name, epoch, index, progress)

        flop += stage.steps * flops.count(step, learning, index, index, progress)
    return flop


def acting_flop(run: Run) -> float:
    """Count the FLOP of acting in one environment for one step."""
    algo = _plain(run.algo)
    timestep = _timesteps(run, 1)
    policy = jax.eval_shape(algo.policy, run.trainer.shapes().algo)
    actor = jax.eval_shape(algo.init_carry, policy, timestep, jax.ShapeDtypeStruct((1,), jnp.int32))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    progress = jax.eval_shape(start)

    def act(policy: Any, carry: Any, timestep: Any, keys: Any, progress: Any) -> Any:
        return algo.act(policy, carry, timestep, keys, progress, "explore")

    return flops.count(act, policy, actor, timestep, keys, progress)


def _timesteps(run: Run, count: int) -> Any:
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), count))
    return jax.eval_shape(lambda keys: run.env.reset(keys, run.env.context(start()))[1], keys)


# Parts of an iteration


class Parts:
    """Collecting and learning of one configuration, compiled separately.

    Attributes:
        run: of the configuration.
        env_steps: of one call of `collect`.
        flop: of one call of `learn`.
    """

    def __init__(self, run: Run, min_seconds: float = 0.1) -> None:
        self.run = run
        self._min_seconds = min_seconds
        self.phase = measured_phase(run.algo)
        self.env_steps = self.phase.steps * run.trainer.layout.num_envs
        trainer = run.trainer
        time_first = PartitionSpec(None, AXIS)
        collect = on_mesh(self._collect, run.mesh, (trainer.specs(),), (time_first, SPLIT))
        self._state = trainer.init(jax.random.key(0))
        self._collect_rollout = jax.jit(collect, compiler_options=compiler_options()).lower(self._state).compile()
        self.flop = 0.0

    def _collect(self, state: Any) -> Any:
        """Make the first half of an iteration, like the trainer."""
        return self.run.trainer.rollout(state, self.phase, state.key)[:2]

    def collecting(self, name: str) -> Sampler:
        return stopwatch(name, lambda: self._collect_rollout(self._state), self._min_seconds)

    def learning(self, name: str) -> Sampler:
        """Sample seconds of learning from an iteration; compiles."""
        run = self.run
        trainer = self.run.trainer
        phase = self.phase
        specs = trainer.specs().algo

        def train(state: Any, trajectory: Any, last: Any, key: Any, progress: Any) -> Any:
            return run.algo.learn(state, trajectory, last, key, progress, phase)

        in_specs = (specs, PartitionSpec(None, AXIS), SPLIT, REPLICATED, REPLICATED)
        function = on_mesh(train, run.mesh, in_specs, (specs, REPLICATED))
        data = jax.block_until_ready(self._collect_rollout(self._state))
        rest = (*data, self._state.key, self._state.progress)
        compiled = (
            jax.jit(function, donate_argnums=0, compiler_options=compiler_options())
            .lower(self._state.algo, *rest)
            .compile()
        )
        self.flop = learning_flop(run)
        held = [jax.tree.map(jnp.copy, self._state.algo)]

        def learn() -> Any:
            held[0], metrics = compiled(held[0], *rest)
            return held[0], metrics

        return stopwatch(name, learn, self._min_seconds)


def iterations(run: Run, block: Any) -> Callable[[], Any]:
    """Return a function that makes a whole iteration, continuing from the last, and returns its results."""
    index = list(run.algo.phases).index(measured_phase(run.algo))
    state = run.trainer.init(jax.random.key(0))
    placed = shardings(run.mesh, REPLICATED)
    held = [dataclasses.replace(state, phase=jax.device_put(jnp.int32(index), placed))]
    one = jax.device_put(jnp.int32(1), placed)

    def iterate() -> Any:
        held[0], metrics = block(held[0], one)
        return held[0], metrics

    return iterate


def compile_block(run: Run) -> Any:
    """Compile the program of the measured phase's iterations."""
    iterations = jax.ShapeDtypeStruct((), jnp.int32, sharding=shardings(run.mesh, REPLICATED))
    block: Any = run.trainer.make_block(measured_phase(run.algo))
    return block.lower(run.trainer.shapes(), iterations).compile()
