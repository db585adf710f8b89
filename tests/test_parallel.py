"""Devices: the same results on any number of them, what they exchange, gradients, chunks, and blocks of iterations."""

import dataclasses
import functools
import hashlib
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.off_policy import assert_close
from helpers.tiny import Corridor, TinyQ

import envs_jax
from envs_jax.base import Array
from envs_jax.batch import batched
from jaxrl.algos.base import Algorithm, AlgoState, Phase
from jaxrl.algos.coma import Coma
from jaxrl.rl.data_parallel import REPLICATED, SPLIT, DataParallel, make_mesh, map_chunks, on_mesh
from jaxrl.runtime.trainer import Trainer, TrainState

ENVS, SHARDS = 16, 8
COMA = {
    "hidden_size": 8, "num_epochs": 2, "minibatch_size": 160, "actor_lr": 1e-2, "critic_lr": 1e-2,
    "normalize_advantage": True,
    "clip_ratio": 0.2, "dueling": True, "tau": 0.1, "final_lr_fraction": 0.5, "entropy_weight": 0.01,
    "max_grad_norm": 0.5,
}  # fmt: skip


def make_trainer(
    algo: type[Algorithm], devices: int, settings: dict[str, Any], env: Any = None, block: int = 7
) -> Trainer:
    env = env or Corridor(num_agents=2)
    layout = DataParallel(ENVS, SHARDS, devices)
    mesh = make_mesh(devices)
    return Trainer(batched(env), algo(env.spec, layout, **settings), layout, mesh, block, 0, jnp.float16, 10_000)


def train(trainer: Trainer, blocks: tuple[int, ...]) -> TrainState:
    """Phases of fixed length in one block, the last phase in `blocks`."""
    state = trainer.init(jax.random.key(0))
    for phase in trainer.algo.phases:
        block = trainer.make_block(phase)
        for iterations in blocks if phase.iterations is None else (phase.iterations,):
            state, metrics = block(state, jnp.int32(iterations))
            assert int(metrics.iterations) == iterations and int(metrics.not_finite) == -1
    return state


def digests(tree: Any) -> dict[str, str]:
    """A hash for each leaf of the whole state, so that a failure names what differs."""

    def digest(leaf: Array) -> str:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()[:12]

    return {jax.tree_util.keystr(path): digest(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


# The same results


@functools.cache
def on_one_device(algo: type[Algorithm]) -> TrainState:
    return train(make_trainer(algo, 1, COMA if algo is Coma else {}), (2, 3))


@pytest.mark.parametrize(
    "devices", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow), 8]
)
@pytest.mark.parametrize("algo", [pytest.param(TinyQ, marks=pytest.mark.slow), Coma])
def test_training_computes_the_same_on_any_number_of_devices(algo: type[Algorithm], devices: int) -> None:
    """Up to the order of sums over devices; actions, counters and keys are equal."""
    state = train(make_trainer(algo, devices, COMA if algo is Coma else {}), (2, 3))
    assert_close(state, on_one_device(algo), 1e-4)


@pytest.mark.slow
def test_coverage_computes_the_same_on_one_and_eight_devices() -> None:
    env = envs_jax.make("coverage", q=5, num_agents=2, budget=3)
    settings = COMA | {"num_epochs": 1, "egocentric": True}
    one, eight = (train(make_trainer(Coma, n, settings, env), (2, 1)) for n in (1, 8))
    assert_close(one, eight, 1e-3)


@dataclasses.dataclass(frozen=True)
class Scripted(Algorithm):
    """Acts only by the environments' keys and keeps the last trajectory."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase("watch", 6, 0),)

    def init(self, key: Array, inputs: Any) -> AlgoState:
        steps, envs = self.phases[0].steps, ENVS // SHARDS
        rows = (self.layout.local_shards, envs, steps, self.spec.num_agents)
        size = self.spec.observation.shape[0]  # type: ignore[union-attr]
        replay = {"observation": jnp.zeros((*rows, size), jnp.float16), "action": jnp.zeros(rows, jnp.int32)}
        return AlgoState(
            {"none": jnp.zeros(1)}, replay | {"reward": jnp.zeros(rows), "done": jnp.zeros(rows[:-1], bool)}
        )

    def policy(self, state: AlgoState) -> Any:
        return ()

    def act(self, policy: Any, carry: Any, timestep: Any, keys: Array, progress: Any, mode: Any) -> Any:
        return (
            jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (self.spec.num_agents,)).astype(jnp.int32))(keys),
            carry,
            (),
        )

    def learn(self, state: Any, trajectory: Any, last: Any, key: Any, progress: Any, phase: Any) -> Any:
        step = trajectory.timestep
        rows = {"observation": step.observation, "action": trajectory.action, "reward": step.reward, "done": step.done}
        rows = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), rows)
        return AlgoState(state.replicated, self.layout.split(rows)), {}


def test_scripted_flights_are_the_same_on_any_number_of_devices() -> None:
    states = {n: train(make_trainer(Scripted, n, {}), (2, 3)) for n in (1, 8)}
    assert np.asarray(states[1].algo.sharded["done"]).any() and np.asarray(states[1].algo.sharded["reward"]).any()
    assert digests(states[1]) == digests(states[8])


# What devices exchange


def collectives(text: str) -> list[tuple[str, int]]:
    """(operation, elements) of every collective in a compiled program."""
    names = "all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast|reduce-scatter"
    matches = re.findall(rf"= (.*?) ({names})(?:-start)?\(", text)
    sizes = [(name, re.findall(r"\w+\[([\d,]*)\]", shapes)) for shapes, name in matches]
    return [(name, sum(math.prod(map(int, s.split(","))) if s else 1 for s in shapes)) for name, shapes in sizes]


@pytest.mark.parametrize("algo", [TinyQ, Coma])
def test_fast_blocks_exchange_gradients_and_scalars_only(algo: type[Algorithm]) -> None:
    trainer = make_trainer(algo, 8, COMA if algo is Coma else {})
    shapes = trainer.shapes()
    program = trainer.make_block(trainer.algo.phases[-1]).lower(shapes, jnp.int32(1)).compile()
    exchanged = collectives(program.as_text())
    parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes.algo.replicated))
    assert exchanged and {name for name, _ in exchanged} == {"all-reduce"}
    assert max(size for _, size in exchanged) <= parameters + 16
    if algo is TinyQ:  # far below one logical shard's share of the replay
        assert max(size for _, size in exchanged) < min(
            x.size for x in jax.tree.leaves(shapes.algo.sharded) if x.ndim > 1
        )


# Gradients


def loss(params: dict[str, Array], samples: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
    out = jnp.tanh(samples["x"] @ params["w"]) + params["b"][None]
    error = jnp.square(out - samples["y"])
    return jnp.mean(error), {"first": jnp.mean(out[:, 0])}


loss_and_gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize(("learn", "forward", "expected"), [(0, 0, 24), (4, 0, 4), (4, 9, 8), (4, 100, 24)])
def test_a_pass_without_gradient_has_chunks_of_its_own(learn: int, forward: int, expected: int) -> None:
    layout = DataParallel(12, 2, 1, learn_chunk=learn, forward_chunk=forward)
    sizes = []

    def double(rows: jax.Array) -> jax.Array:
        sizes.append(len(rows))
        return 2 * rows

    data = jnp.arange(24.0).reshape(2, 12)
    np.testing.assert_array_equal(layout.apply(double, data), 2 * data)
    assert set(sizes) == {expected}


@pytest.mark.parametrize("learn_chunk", [0, 4])
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow), 8])
def test_gradient_is_that_of_the_whole_batch(devices: int, learn_chunk: int) -> None:
    rng = np.random.default_rng(0)

    def draw(*shape: Any) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    params, batch = {"w": draw(5, 3), "b": draw(3)}, {"x": draw(8, 12, 5), "y": draw(8, 12, 3)}
    whole = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), batch)
    (value, aux), gradient = loss_and_gradient(params, whole)

    layout = DataParallel(ENVS, SHARDS, devices, learn_chunk)
    function = on_mesh(
        lambda params, batch: layout.gradient(loss, params, batch), make_mesh(devices), (REPLICATED, SPLIT), REPLICATED
    )
    result = jax.jit(function)(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), result, (gradient, (value, aux)))


@pytest.mark.parametrize("devices", [1, 4])
def test_sums_and_means_go_over_all_devices(devices: int) -> None:
    layout = DataParallel(ENVS, SHARDS, devices)

    def function(x: Array) -> Any:
        return layout.sum(x), layout.mean(x), layout.sample_mean(x)

    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    result = jax.jit(on_mesh(function, make_mesh(devices), (SPLIT,), REPLICATED))(rows)
    for actual, expected in zip(result, (rows.sum(0), rows.mean(0), rows.mean()), strict=True):
        np.testing.assert_array_equal(actual, expected)


# Chunks


@pytest.mark.parametrize("chunks", [1, 2, 3, 6])
def test_chunks_give_what_one_call_gives(chunks: int) -> None:
    batch = {"x": np.arange(24, dtype=np.float32).reshape(6, 4), "key": jax.random.split(jax.random.key(3), 6)}

    def function(part: Any) -> Any:
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(part["key"], 7)
        over_time = {"x": jnp.stack([part["x"], 2 * part["x"]]), "key": jnp.stack([part["key"], keys])}  # [T, B, ...]
        return {"state": (keys, part["x"] > 3)}, over_time

    expected = jax.jit(function)(batch)
    actual = jax.jit(lambda batch: map_chunks(function, batch, chunks, out_axes=(0, 1)))(batch)
    assert digests(actual) == digests(expected)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), actual) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
    back = jax.jit(
        lambda outputs: map_chunks(lambda rows: jax.tree.map(lambda x: x[0], rows), outputs, chunks, 0, in_axis=1)
    )(expected[1])
    assert digests(back) == digests(batch)


# Blocks


def test_blocks_of_any_length_compile_once_donate_and_end_in_the_same_bits() -> None:
    trainer = make_trainer(TinyQ, 8, {})
    fill, last = trainer.algo.phases
    init, filled = trainer.make_init(), trainer.make_block(fill)

    def begin() -> Any:
        return filled(init(jax.random.key(0), None), jnp.int32(2))[0]

    block = trainer.make_block(last)
    parts, rows = begin(), []
    for iterations in (3, 4):
        before = parts
        parts, metrics = block(parts, jnp.int32(iterations))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
        assert int(metrics.iterations) == iterations
        rows.append(jax.tree.map(lambda x, n=iterations: x[:n], metrics.learning))
    assert block._cache_size() == 1
    whole, metrics = block(begin(), jnp.int32(7))
    assert block._cache_size() == 1
    assert digests(parts) == digests(whole)
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *rows)
    assert digests(joined) == digests(metrics.learning)
