"""Record a few updates of the PyTorch learners in `bench/`, with which tests/test_recorded_updates.py compares ours.

    python -m scripts.record_torch_updates [--out FILE]

Networks are tiny, weights and batches random numbers, settings chosen so that each of them shows: rates of actor and
critic differ, target networks start elsewhere than the online ones, Adam's epsilon lies above the rounding of
gradients. tests/data/README.md describes the file.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from bench.reference.coverage.torch_learner import TorchComa, epsilon
from bench.reference.reach.torch_learner import TorchSac
from bench.reference.snakes.torch_learner import TorchDdpg
from bench.reference.torch_learner import window_return

OUT = Path(__file__).parents[1] / "tests" / "data" / "torch_updates.npz"
Arrays = dict[str, np.ndarray]

# By the names that both learners have; tests hand them to ours.
RATES = {"actor_lr": 3e-3, "critic_lr": 1e-2, "adam_epsilon": 1e-3}
COMA = RATES | {
    "hidden_size": 3,
    "num_minibatches": 2,
    "num_epochs": 2,
    "gamma": 0.9,
    "td_lambda": 0.7,
    "target_update_period": 2,
}
EXPLORING = {"eps_max": 0.5, "eps_min": 0.1, "eps_anneal": 9}
DDPG = RATES | {"hidden_size": 8, "gamma": 0.9, "tau": 0.3}
SAC = RATES | {"hidden_size": 8, "gamma": 0.9, "tau": 0.3, "alpha_lr": 2e-2}
SETTINGS: dict[str, dict[str, Any]] = {
    "coma": COMA | EXPLORING,
    "coma soft": COMA | EXPLORING | {"tau": 0.3, "num_minibatches": 1},
    "coma clipped": COMA | EXPLORING | {
        "actor_epochs": 1, "advantage": "return", "scale_advantage": True, "dueling": True, "clip_ratio": 0.2,
        "entropy_weight": 0.3, "entropy_final": 0.1, "entropy_anneal": 6, "final_lr_fraction": 0.2,
    },
    "ddpg": DDPG | {"n_step": 3, "max_grad_norm": 0.2},
    "ddpg expected": DDPG | {
        "action_gradient": "expected", "masking": True, "entropy_weight": 0.3, "logit_weight": 0.1,
        "max_grad_norm": 0.0,
    },
    "bicnet": DDPG | {"hidden_size": 5, "max_grad_norm": 0.1, "adam_epsilon": 1e-4},
    "sac": SAC,
    "sac tasks": SAC | {"n_step": 3, "layer_norm": True, "actor_update_period": 2, "target_update_period": 3,
    "adam_epsilon": 1e-2},
}  # fmt: skip
UPDATES = {"coma": 2, "ddpg": 3, "bicnet": 2, "sac": 3}  # "sac tasks" has four


def short(numbers: Any) -> np.ndarray:
    """float32 in 512ths, which files compress well."""
    return (np.round(np.asarray(numbers) * 512) / 512).astype(np.float32)


def scatter(learner: Any, networks: tuple[str, ...], random: np.random.Generator, bias: float = 0.0) -> None:
    """Move every weight by a normal number, so that no two networks, biases or scales are alike; biases by more."""
    for name in networks:
        parameters = [x.detach().numpy() for x in getattr(learner, name).parameters()]
        moved = [x + 0.1 * random.normal(size=x.shape) + bias * (x.ndim == 1) for x in parameters]
        learner.set_parameters(name, [short(x) for x in moved])


def weights(learner: Any, networks: tuple[str, ...]) -> Arrays:
    """Each network as one vector float32[P], its parameters in PyTorch's order and layout."""
    rows = {name: [x.detach().numpy().ravel() for x in getattr(learner, name).parameters()] for name in networks}
    return {name: np.concatenate(vectors) for name, vectors in rows.items()}


def set_rates(learner: Any, settings: dict[str, Any], share: float) -> None:
    """Learning rates as a share of those in `settings`."""
    for name in ("actor", "critic", "alpha"):
        optimizer = getattr(learner, f"{name}_adam", None) or getattr(learner, f"{name}_optimizer", None)
        for group in optimizer.param_groups if optimizer else ():
            group["lr"] = settings[f"{name}_lr"] * share


class FixedOrder:
    """A generator that shuffles in a fixed order."""

    def __init__(self, order: np.ndarray):
        self.order = order

    def permutation(self, count: int) -> np.ndarray:
        assert count == len(self.order)
        return self.order


def coma(case: str, random: np.random.Generator) -> tuple[Arrays, list[tuple[Arrays, Arrays, dict[str, float]]]]:
    """Two training steps on three missions of three steps, three agents with four actions."""
    missions, steps, agents, actions, settings = 3, 3, 3, 4, SETTINGS[case]
    elsewhere = (*EXPLORING, "td_lambda", "final_lr_fraction", "entropy_weight", "entropy_final", "entropy_anneal")
    learner_settings = {name: value for name, value in settings.items() if name not in elsewhere}
    learner = TorchComa(agents, actions, lam=settings["td_lambda"], **learner_settings)
    networks = ("actor", "critic", "target_critic")
    scatter(learner, networks, random, bias=0.2)  # of three channels none is dead
    initial, rows = weights(learner, networks), []
    for update in range(UPDATES["coma"]):
        count = missions * steps
        mask = random.random((count, agents, actions)) < 0.6
        action = random.integers(0, actions, (count, agents))
        np.put_along_axis(mask, action[..., None], True, axis=-1)
        batch = {
            "observation": random.binomial(8, 0.02, (count, agents, 11, 11, 7)).astype(np.uint8),  # in eighths
            "critic_input": random.binomial(8, 0.02, (count, agents, 11, 11, 12)).astype(np.uint8),
            "action": action.astype(np.uint8), "mask": mask,
            "reward": short(random.normal(size=count)),
            "log_prob": short(np.log(random.uniform(0.1, 0.9, (count, agents)))),
            "order": random.permutation(count * agents).astype(np.uint8),
        }  # fmt: skip
        bonus, share = settings.get("entropy_weight", 0.0), 1.0
        if bonus:
            past = min(update * missions / settings["entropy_anneal"], 1.0)
            bonus += (settings["entropy_final"] - bonus) * past
        if "final_lr_fraction" in settings:  # a quarter of the run with every training step
            share = 1 - (1 - settings["final_lr_fraction"]) * update / 4
        set_rates(learner, settings, share)
        learner.rng = FixedOrder(batch["order"].astype(np.int64))  # type: ignore[assignment]
        minibatch = {"reward": batch["reward"], "action": action, "mask": mask, "log_prob": batch["log_prob"]}
        minibatch |= {"obs": batch["observation"] / np.float32(8), "state": batch["critic_input"] / np.float32(8)}
        minibatch["done"] = np.tile(np.arange(steps) == steps - 1, missions)
        exploration = (settings[name] for name in EXPLORING)
        metrics = learner.train_step(
            minibatch | {"eps": epsilon((update + 1) * missions, *exploration), "entropy_weight": bonus}
        )
        rows.append((batch, weights(learner, networks), metrics))
    return initial, rows


def windows(random: np.random.Generator, count: int, steps: int, agents: int) -> Arrays:
    """Rewards [M, n, A], how episodes go on or end [M, n], and weights [M], some of them 0."""
    return {
        "reward": short(random.normal(size=(count, steps, agents))),
        "end": random.choice(3, (count, steps), p=(0.7, 0.15, 0.15)).astype(np.uint8),
        "weight": short(np.maximum(random.uniform(-0.2, 1, count), 0)),
    }


def ddpg(case: str, random: np.random.Generator) -> tuple[Arrays, list[tuple[Arrays, Arrays, dict[str, float]]]]:
    """Three updates on twelve steps of three agents with four actions; of BiCNet, two."""
    count, agents, inputs, actions, settings = 12, 3, 5, 4, SETTINGS[case]
    learner_settings = {
        name: value for name, value in settings.items() if name not in ("action_gradient", "masking", "n_step")
    }
    expected = case == "ddpg expected"
    learner = TorchDdpg(inputs, actions, bicnet=case == "bicnet", expected=expected, **learner_settings)
    networks = ("actor", "critic", "target_actor", "target_critic")
    scatter(learner, networks, random, bias=0.1)
    initial, rows = weights(learner, networks), []
    for update in range(UPDATES[case.split()[0]]):
        batch = windows(random, count, settings.get("n_step", 1), agents)
        for name in ("observation", "next"):
            batch[name] = short(random.normal(size=(count, agents, inputs)))
        batch["vector"] = short(random.dirichlet(np.ones(actions), (count, agents)))
        if expected:
            action = random.integers(0, actions, (count, agents))
            batch["vector"] = np.eye(actions, dtype=np.float32)[action]
            for name in ("mask", "next_mask"):
                batch[name] = random.random((count, agents, actions)) < 0.6
                np.put_along_axis(batch[name], action[..., None], True, axis=-1)
        batch["rate"] = np.float32(1 - 0.2 * update)
        set_rates(learner, settings, float(batch["rate"]))
        returns, discount = window_return(batch["reward"], batch["end"], settings["gamma"])
        minibatch = batch | {"reward": returns, "discount": discount, "done": np.zeros(count)}
        metrics = learner.update(minibatch)
        rows.append((batch, weights(learner, networks), metrics))
    return initial, rows


def sac(case: str, random: np.random.Generator) -> tuple[Arrays, list[tuple[Arrays, Arrays, dict[str, float]]]]:
    """Updates on twelve steps: two agents with three numbers to act by; or one agent in two tasks."""
    tasks, settings = (2 if case == "sac tasks" else 1), SETTINGS[case]
    count, agents, inputs, actions = 12, 3 - tasks, 6, 3
    learner_settings = {name: value for name, value in settings.items() if name != "n_step"}
    learner_settings = {"target_update_period": 1, "target_entropy": -float(actions), "tasks": tasks} | learner_settings
    learner = TorchSac(inputs, actions, **learner_settings)
    networks = ("actor", "critic", "target_critic")
    scatter(learner, networks, random)
    with learner.torch.no_grad():
        learner.actor[-1].weight.div_(4)  # actions stay away from the ends, where the density amplifies rounding
        learner.actor[-1].bias[actions:] += 1.0  # and deviations matter: exp(-9) otherwise
        learner.log_alpha.copy_(learner.torch.tensor([math.log(0.3), math.log(0.8)][:tasks]))

    def everything() -> Arrays:
        return weights(learner, networks) | {"log_alpha": learner.log_alpha.detach().numpy().copy()}

    initial, rows = everything(), []
    for update in range(UPDATES["sac"] + (tasks > 1)):
        batch = windows(random, count, settings.get("n_step", 1), agents)
        for name in ("observation", "next"):
            batch[name] = short(random.normal(size=(count, agents, inputs)) / 2)
        batch["action"] = short(random.uniform(-1, 1, (count, agents, actions)))
        batch["noise"] = short(random.normal(size=(count, 2, agents, actions)))
        batch["task"] = random.integers(0, tasks, count)
        batch["rate"] = np.float32(1 - 0.2 * update)
        set_rates(learner, settings, float(batch["rate"]))
        # agents share all weights: to one arm they are as many samples
        returns, discount = window_return(batch["reward"], batch["end"], settings["gamma"])
        minibatch = {"reward": returns.reshape(-1)} | {
            name: batch[name].reshape(count * agents, -1) for name in ("observation", "next", "action")
        }
        minibatch |= {
            name: np.repeat(x, agents)
            for name, x in (("discount", discount), ("weight", batch["weight"]), ("task", batch["task"]))
        }
        noise = batch["noise"].swapaxes(1, 2).reshape(-1, 2, actions)
        rows.append((batch, {}, learner.update(minibatch, np.ascontiguousarray(noise))))
        rows[-1][1].update(everything())
    return initial, rows


def record() -> Arrays:
    """All cases: {"case/initial/network", "case/number/batch/name", "case/number/after/name", ..., "settings"}."""
    makers = {"coma": coma, "ddpg": ddpg, "bicnet": ddpg, "sac": sac}
    arrays: Arrays = {"settings": np.array(json.dumps(SETTINGS))}
    for seed, case in enumerate(SETTINGS):
        initial, rows = makers[case.split()[0]](case, np.random.default_rng(seed))
        arrays |= {f"{case}/initial/{name}": x for name, x in initial.items()}
        for index, (batch, after, metrics) in enumerate(rows):
            arrays |= {f"{case}/{index}/batch/{name}": np.asarray(x) for name, x in batch.items()}
            arrays |= {f"{case}/{index}/after/{name}": x for name, x in after.items()}
            arrays[f"{case}/{index}/metrics"] = np.array(json.dumps(metrics))
    return arrays


def main() -> None:
    """Write the file that tests read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="write the updates to this file")
    out = parser.parse_args().out
    np.savez_compressed(out, **record())  # type: ignore[arg-type]
    print(f"wrote {out}: {out.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
