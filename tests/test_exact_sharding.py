"""Algorithms with a replay on several devices: the same bits on any number of them, and what devices exchange."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.off_policy import OptimisedLayout, digest, make_trainer, run, trainer_of
from helpers.tiny import Corridor

from envs_jax.base import Array, TimeStep
from jaxrl.algos.base import Algorithm, AlgoState, Mode, Phase, Progress, Trajectory, next_timesteps
from jaxrl.nn import networks, optimizers
from jaxrl.nn.packed import Packed
from jaxrl.runtime.checkpoint import Checkpoints


@pytest.mark.parametrize(
    ("case", "counts"),
    [
        pytest.param("ddpg gumbel", (1, 8), marks=pytest.mark.long),
        ("sac", (1, 8)),
        pytest.param("student", (1, 8), marks=pytest.mark.long),
        pytest.param("ddpg published", (1, 8), marks=pytest.mark.long),
        pytest.param("ddpg bicnet", (1, 8), marks=pytest.mark.long),
        pytest.param("ddpg continuous", (1, 8), marks=pytest.mark.long),
        pytest.param("sac modern", (1, 2, 4, 8), marks=pytest.mark.long),
    ],
)
def test_exact_training_has_the_same_bits_on_any_number_of_devices(
    case: str, counts: tuple[int, ...], tmp_path: Path
) -> None:
    """From the start, and from a checkpoint of one device, written when the ring has gone round.

    SAC and continuous DDPG play no random steps here: their rings are full as soon.
    """
    more: dict[str, Any] = {"kind": OptimisedLayout} if case in ("sac", "sac modern", "ddpg continuous") else {}
    more |= {"random_steps": 0} if case in ("sac", "ddpg continuous") else {}
    begun, ended = [], []
    with Checkpoints(tmp_path) as checkpoints:
        for devices in counts:
            trainer = trainer_of(case, devices, exact=True, **more)
            state, _ = run(trainer, 8)
            assert int(state.algo.sharded.filled[0]) == trainer.algo.replay.rows - 1
            begun.append(digest(state))
            block = trainer.make_block(trainer.algo.phases[-1])
            if devices == 1:
                checkpoints.save(1, state, {})
                checkpoints.wait()
                ended.append(digest(block(state, jnp.int32(2))[0]))
            _, restored, _ = checkpoints.restore(trainer.shapes())
            ended.append(digest(block(restored, jnp.int32(2))[0]))
    for states in (begun, ended):
        assert {name for state in states for name in state if state[name] != states[0][name]} == set()
    assert ended[0] != begun[0]


@pytest.mark.parametrize(
    "case",
    [
        "ddpg gumbel",
        pytest.param("ddpg published", marks=pytest.mark.long),
        pytest.param("sac modern", marks=pytest.mark.long),
    ],
)
def test_devices_exchange_gradients_only_and_the_replay_is_not_copied(case: str) -> None:
    trainer = trainer_of(case, 2, buffer_size=400_000)
    block = trainer.make_block(trainer.algo.phases[-1]).lower(trainer.shapes(), jnp.int32(1)).compile()
    text = block.as_text()
    assert re.search(r"all-reduce", text) and not re.search(r"all-gather|all-to-all|collective-permute", text)
    memory = block.memory_analysis()
    ring = 200_000 * trainer.algo.replay.row_bytes
    assert memory.alias_size_in_bytes >= ring > 4 * memory.temp_size_in_bytes


@dataclasses.dataclass(frozen=True)
class Forecast(Algorithm):
    """A user's algorithm: walks at random and learns the value of that from whole iterations, all updates in a scan."""

    parts = ("value",)
    phases = (Phase("train", steps=4, updates=3),)

    @property
    def networks(self) -> dict[str, Packed]:
        return {
            "value": self.make_network("value", 1, lambda n: networks.MLP(n, 32), (1, *self.spec.observation.shape))
        }

    def optimizer(self, part: str) -> optax.GradientTransformation:
        return optimizers.adam(1e-5, max_grad_norm=0.3)

    def learning_rate(self, part: str, progress: Progress) -> Array:
        return 3e-2 * (1 - 0.7 * progress.fraction)

    def init(self, key: Array, inputs: Any) -> AlgoState:
        vector = self.fresh_networks(key, inputs)["value"]
        return AlgoState({"value": self.learner("value", vector), "target": vector}, ())

    def policy(self, state: AlgoState) -> Any:
        return ()

    def act(self, policy: Any, carry: Any, timestep: TimeStep, keys: Array, progress: Progress, mode: Mode) -> Any:
        draw = lambda key: jax.random.bernoulli(key, 0.7, (self.spec.num_agents,)).astype(jnp.int32)  # noqa: E731
        return jax.vmap(draw)(keys), carry, ()

    def learn(
        self, state: AlgoState, trajectory: Trajectory, last: TimeStep, key: Array, progress: Progress, phase: Phase
    ) -> Any:
        following = next_timesteps(trajectory, last)
        rows = trajectory.timestep.observation, following.observation, following.reward
        batch = jax.tree.map(lambda x: self.layout.split(jnp.swapaxes(x, 0, 1)), rows)

        def update(params: dict[str, Any], number: Array) -> Any:
            def loss(vector: Array, sample: Any) -> tuple[Array, dict[str, Array]]:
                now, after, reward = (x.reshape(-1, *x.shape[3:]) for x in sample)
                value, next_value = (
                    self.networks["value"].apply(params, seen)[:, 0]
                    for params, seen in ((vector, now), (target, after))
                )
                return jnp.mean(jnp.square(reward + 0.9 * next_value - value)), {"value": value.mean()}

            learner, target = params["value"], params["target"]
            gradient, (_, means) = self.layout.gradient(loss, learner.params, batch)
            learner, norm = self.step("value", learner, gradient, progress, number > 0)
            target = self.soft_update(target, learner.params, 0.01)
            return {"value": learner, "target": target}, means | {"grad_norm": norm}

        params, metrics = jax.lax.scan(update, state.replicated, jnp.arange(phase.updates))
        return AlgoState(params, ()), metrics


def test_gradient_and_step_are_enough_for_the_same_bits() -> None:
    """Of an algorithm that knows nothing of devices."""
    found = {}
    for devices, exact in ((1, True), (8, True), (1, False), (8, False)):
        trainer = make_trainer(Forecast, Corridor(num_agents=2), 16, devices, exact, kind=OptimisedLayout)
        state, metrics = run(trainer, 20)
        found[devices, exact] = digest((state, metrics.learning))
    assert found[1, True] == found[8, True]
    assert found[1, False] != found[8, False]  # sums over devices do round differently
