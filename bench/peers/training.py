"""Training as a worker times it: PPO on a game of six snakes, with our learner or with PufferLib's on its own snake.

Every snake learns, for itself, with the same number of snakes, steps per rollout, epochs, minibatches and hidden units,
and without a memory. An iteration plays `HORIZON` steps of all games and learns from them. NOTES say what differs.
"""

import contextlib
import dataclasses
import importlib
import itertools
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from bench.peers.environments import Measured, Skipped, make_puffer

SNAKES = 6
HORIZON = 64
MINIBATCHES = 4
HIDDEN_SIZE = 128
DEPTH = 2
LEARNING_RATE = 3e-4
GAMMA = 0.99
GAE_LAMBDA = 0.95
CLIP_RATIO = 0.2
ENTROPY_WEIGHT = 0.01
MAX_GRAD_NORM = 0.5
ENDLESS = 10**12  # steps, since the samples decide when training ends

NOTES = (
    "rates count steps of games with 6 snakes, so agent steps are 6 times as many; rollout and learning are in them, "
    "compilation and the first sample are not",
    "both: 6 snakes on 10 x 20 cells with 5 beans, each learning for itself; no action masks, no scripted opponents, "
    "no LSTM; rollouts of 64 steps, 4 minibatches, 128 hidden units; float32, observations stored as int8; Adam",
    "ours: the whole board as 263 numbers (obs_full), or 26 numbers (obs26); a torus; a game ends after 200 steps; "
    "separate actor and critic with two hidden layers; jaxrl's usual program for a run, without evaluations and files",
    "pufferlib: views of 11 x 11 cells (121 numbers) or 17 x 17 (289); walls around the board; neither games nor "
    "snakes' lives end an episode, bodies of dead snakes turn into food; its C code steps all games in the trainer's "
    "process, as its native backend does",
    "pufferlib, 'networks as ours': separate actor and critic with two hidden layers. 'Default policy': its own, one "
    "hidden layer that actor and critic share. 'Snake policy': what its snake is configured with, the same on one-hot "
    "cells (968 numbers)",
    "pufferlib's PPO: V-trace advantages of the whole rollout before each minibatch, by its own C++ kernel; "
    "minibatches of whole segments of 64 steps, drawn anew each time (prio_alpha 0: all equally likely); clipped "
    "values",
    "rewards: ours `lives`, pufferlib 0.1 for food and -1 for a death; ours clips the gradients of each network, "
    "pufferlib those of both together",
    "changed in pufferlib: Adam instead of Muon, no learning-rate schedule; screen output, system monitor and "
    "checkpoints are off; torch.compile is off, as in its defaults; one thread",
)


@dataclasses.dataclass(frozen=True)
class Setup:
    """Settings of one row of the table.

    Attributes:
        epochs: over each rollout.
        observation: of our snakes.
        vision: cells that PufferLib's snakes see in each direction.
        policy: name of PufferLib's policy class, empty for networks as ours.
    """

    epochs: int
    observation: str = ""
    vision: int = 5
    policy: str = ""


SETUPS: dict[str, dict[str, Setup]] = {
    "ours": {
        "4 epochs: 263 inputs": Setup(4, "obs_full"),
        "1 epoch: 263 inputs": Setup(1, "obs_full"),
        "4 epochs: 26 inputs": Setup(4, "obs26"),
        "1 epoch: 26 inputs": Setup(1, "obs26"),
    },
    "pufferlib": {
        "4 epochs: 289 inputs with networks as ours": Setup(4, vision=8),
        "1 epoch: 289 inputs with networks as ours": Setup(1, vision=8),
        "4 epochs: 121 inputs with networks as ours": Setup(4),
        "1 epoch: 121 inputs with networks as ours": Setup(1),
        "4 epochs: 121 inputs with its Default policy": Setup(4, policy="Policy"),
        "1 epoch: 121 inputs with its Default policy": Setup(1, policy="Policy"),
        "4 epochs: 968 inputs with its Snake policy": Setup(4, policy="Snake"),
    },
}


def open_training(peer: str, name: str, copies: int) -> Measured:
    """Return a learner that is ready to train on this many games. Raises Skipped."""
    setup = SETUPS[peer][name]
    return _ours(setup, copies) if peer == "ours" else _puffer(setup, copies)


def our_settings(setup: Setup, copies: int) -> dict[str, Any]:
    """Return the settings of our run."""
    return {
        "num_envs": copies, "total_env_steps": ENDLESS, "devices": 1, "eval_every": 0,
        "teams": 1, "observation": setup.observation, "masks": False,
        "rollout_steps": HORIZON, "num_minibatches": MINIBATCHES, "num_epochs": setup.epochs,
        "hidden_size": HIDDEN_SIZE, "depth": DEPTH, "critic": "local", "actor_lr": LEARNING_RATE,
        "critic_lr": LEARNING_RATE, "final_lr_fraction": 1.0, "gamma": GAMMA, "td_lambda": GAE_LAMBDA,
        "clip_ratio": CLIP_RATIO, "entropy_weight": ENTROPY_WEIGHT, "max_grad_norm": MAX_GRAD_NORM,
        "normalize_observation": "never", "normalize_value": False,
    }  # fmt: skip


def _ours(setup: Setup, copies: int) -> Measured:
    import jax

    from jaxrl.runtime.build import build_run
    from jaxrl.runtime.compiling import compile_run
    from jaxrl.runtime.config import apply_changes
    from jaxrl.runtime.pieces import Pieces
    from jaxrl.runtime.presets import base_and_source

    config = base_and_source("ppo", None, "snakes")[0]
    run = build_run(apply_changes(config, our_settings(setup, copies), "the peers"))
    compiled = compile_run(run, None, lambda sentence: None)
    assert compiled.start is not None
    state = compiled.start(run.trainer.keys(1), None)
    block, (phase,) = compiled.blocks[0], run.algo.phases
    assert block is not None

    def advance(iterations: int) -> Any:
        nonlocal state
        for _ in range(iterations):
            if isinstance(block, Pieces):  # what long iterations run as in training, too
                result = block.run(state, lambda progress: None, lambda seconds_left: False)
                assert result is not None
                state, metrics = result
            else:
                state, metrics = block(state, np.int32(1))
            jax.block_until_ready(metrics)
        return metrics

    parameters = state.algo.replicated
    learners = parameters.actor.params, parameters.critic.params
    size = sum(x.size for x in jax.tree.leaves(learners))
    facts = {"parameters": size, "updates_per_iteration": phase.updates, "steps_per_iteration": phase.steps}
    return Measured(advance, copies * phase.steps, run.env.env.spec.num_agents, facts)


def puffer_settings(setup: Setup, copies: int) -> dict[str, Any]:
    """Return the settings of PufferLib's trainer. Raises Skipped: minibatches do not hold whole segments."""
    segments = copies * SNAKES
    if segments % MINIBATCHES:
        raise Skipped("needs an even number of games")
    minibatch = segments // MINIBATCHES * HORIZON
    return {
        "env": "snake", "seed": 1, "device": "cpu", "cpu_offload": False, "torch_deterministic": True,
        "precision": "float32", "use_rnn": False, "compile": False,
        "bptt_horizon": HORIZON, "batch_size": "auto", "minibatch_size": minibatch, "max_minibatch_size": minibatch,
        "update_epochs": setup.epochs, "total_timesteps": ENDLESS,
        "optimizer": "adam", "learning_rate": LEARNING_RATE, "anneal_lr": False,
        "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "max_grad_norm": MAX_GRAD_NORM,
        "gamma": GAMMA, "gae_lambda": GAE_LAMBDA, "clip_coef": CLIP_RATIO, "ent_coef": ENTROPY_WEIGHT,
        "vf_coef": 1.0, "vf_clip_coef": 0.2, "vtrace_rho_clip": 1.0, "vtrace_c_clip": 1.0,
        "prio_alpha": 0.0, "prio_beta0": 1.0, "checkpoint_interval": ENDLESS,
    }  # fmt: skip


def _puffer(setup: Setup, copies: int) -> Measured:
    settings = puffer_settings(setup, copies)
    torch, trainer = _import_puffer()
    torch.manual_seed(settings["seed"])
    env = make_puffer(copies, setup.vision)
    if setup.policy:
        policy = getattr(importlib.import_module("pufferlib.ocean.torch"), setup.policy)(env, hidden_size=HIDDEN_SIZE)
        if not hasattr(policy, "forward_eval"):  # Snake has none, because an LSTM usually wraps it
            policy.forward_eval = policy.forward
    else:
        policy = _networks(torch, int(np.prod(env.single_observation_space.shape)), int(env.single_action_space.n))
    with mock.patch.object(trainer.PuffeRL, "print_dashboard"):  # which also begins and clears the screen
        learner = trainer.PuffeRL(settings, env, policy)
    learner.print_dashboard = lambda *_, **__: None
    learner.utilization.stop()

    def advance(iterations: int) -> None:
        for _ in range(iterations):
            learner.evaluate()
            learner.train()

    facts = {
        "parameters": learner.model_size,
        "updates_per_iteration": learner.total_minibatches,
        "steps_per_iteration": HORIZON,
    }
    return Measured(advance, copies * HORIZON, env.num_agents // copies, facts)


def _import_puffer() -> tuple[Any, Any]:
    """Return torch, on one thread, and PufferLib's trainer with its kernel, which no wheel holds."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    # Its search of hyperparameters needs packages of its own, which training does not.
    sys.modules.setdefault("pufferlib.sweep", types.ModuleType("pufferlib.sweep"))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # where its import leaves a link
        package: Any = importlib.import_module("pufferlib")
        if "pufferlib._C" not in sys.modules:
            source = Path(package.__file__).parent / "extensions" / "pufferlib.cpp"
            compiler: Any = importlib.import_module("torch.utils.cpp_extension")
            package._C = sys.modules["pufferlib._C"] = compiler.load("_C", [str(source)], extra_cflags=["-O3"])
        return torch, importlib.import_module("pufferlib.pufferl")


def _networks(torch: Any, inputs: int, actions: int) -> Any:
    """Return an actor and a critic of the size of ours, behind PufferLib's interface."""
    nn = torch.nn

    def layers(outputs: int) -> Any:
        sizes = [inputs, *[HIDDEN_SIZE] * DEPTH]
        hidden = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], outputs))

    class Networks(nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.actor = layers(actions)
            self.critic = layers(1)

        def forward(self, observations: Any, state: Any = None) -> Any:
            x = observations.float()
            return self.actor(x), self.critic(x)

        forward_eval = forward

    return Networks()
