"""Learners as a worker runs them: one environment that all know, equal networks, batches and updates per step.

sac and td3 train on Pendulum-v1, ppo on CartPole-v1, of gymnax for learners in JAX, else of Gymnasium; greedy policies
are scored in Gymnasium for all. The clock holds CPU seconds, with compilation, without scoring.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import runpy
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.peers.environments import Skipped
from bench.studies import known_peers
from bench.studies.known_task import Act, Stop, Task, Watch

EPISODES = 32
HELD_OUT = 2**20  # seed of the first episode that scores
EVALUATIONS = 7  # at least: five times between scores
ENVS, STEPS, MINIBATCHES, EPOCHS = 8, 128, 4, 4  # of ppo: rollouts of 1,024 steps in minibatches of 256

PENDULUM = Task(
    "gymnax:Pendulum-v1", 20_000, num_envs=4, batch_size=256, hidden_size=256, gymnasium="Pendulum-v1",
)  # fmt: skip
CARTPOLE = Task(
    "gymnax:CartPole-v1", 500 * ENVS * STEPS, num_envs=ENVS, batch_size=256, hidden_size=64, gymnasium="CartPole-v1",
    ours={
        "num_envs": ENVS, "rollout_steps": STEPS, "num_minibatches": MINIBATCHES, "num_epochs": EPOCHS,
        "hidden_size": 64, "depth": 2, "actor_lr": 1e-3, "critic_lr": 1e-3, "final_lr_fraction": 1.0,
        "entropy_weight": 0.01,
    },
)  # fmt: skip
# algorithm: task, greedy return that ends it, environment steps between scores
TASKS = {
    "sac": (PENDULUM, -200.0, 1000),
    "td3": (PENDULUM, -200.0, 1000),
    "ppo": (CARTPOLE, 475.0, 8 * ENVS * STEPS),
}


class Clock:
    """Scores a policy now and then while its clock stands still.

    Attributes:
        rows: {"env_steps", "updates", "cpu", "compile", "return"} of each score; CPU seconds since the start.
    """

    def __init__(self, task: Task, target: float) -> None:
        self.task, self.target = task, target
        self.rows: list[dict[str, float]] = []
        self._spent, self._compiling, self._running = 0.0, 0.0, True
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        self._since = self._mark = _now()

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and self._running:
            # of the CPU seconds since the compiler ended last, those in which it ran: the load changes with time
            now = _now()
            cpu, wall = now - self._mark
            self._compiling += float(cpu * min(duration_secs / wall, 1.0))
            self._mark = now

    def evaluate(self, env_steps: int, updates: int, act: Act) -> bool:
        """Score; return whether to stop: the score has been reached, and the speed is known."""
        self._spent += float((_now() - self._since)[0])
        self._running = False
        score = scored(self.task.gymnasium, act)
        row = {"env_steps": env_steps, "updates": updates, "cpu": self._spent, "compile": self._compiling}
        self.rows.append(row | {"return": score})
        self._since = self._mark = _now()
        self._running = True
        return self.reached is not None and len(self.rows) >= EVALUATIONS

    @property
    def reached(self) -> dict[str, float] | None:
        """Return the first row with the score, None where there is none."""
        return next((row for row in self.rows if row["return"] >= self.target), None)


def _now() -> Any:
    """Return CPU and wall seconds, float64[2]."""
    return np.array([time.process_time(), time.perf_counter()])


def scored(name: str, act: Act) -> float:
    """Return the mean return of held-out episodes in Gymnasium, all at once."""
    import gymnasium

    envs = [gymnasium.make(name) for _ in range(EPISODES)]
    seen = np.stack([env.reset(seed=HELD_OUT + n)[0] for n, env in enumerate(envs)]).astype(np.float32)
    total, running = np.zeros(EPISODES), np.ones(EPISODES, bool)
    while running.any():
        timestep: Any = types.SimpleNamespace(observation=jnp.asarray(seen)[:, None])
        action = np.asarray(act(None, timestep, None)[0])[:, 0]
        for n in np.flatnonzero(running):
            seen[n], reward, terminated, truncated, _ = envs[n].step(action[n])
            total[n] += float(reward)
            running[n] = not (terminated or truncated)
    return float(total.mean())


def learn(peer: str, algo: str, seed: int, quick: bool) -> dict[str, Any]:
    """Train until a score is reached, and `EVALUATIONS` times scored, or the steps are used up.

    Returns:
        the scores, "updates_per_second" (median over the times between scores, without the first, which compiles),
        "cpu_to_score" and "env_steps_to_score", None where it is not reached, and "compile_seconds".
    """
    task, target, every = TASKS[algo]
    if quick:
        target, every = -np.inf, ENVS * STEPS if algo == "ppo" else task.random_steps + 64
    for name in IMPORTS[peer]:  # before the clock runs
        known_peers.module(name)
    clock = Clock(task, target)
    LEARNERS[peer](algo, task, seed, Watch(every, clock.evaluate))
    rows = clock.rows
    # The first updates, and compilation, lie before the second score at the latest.
    between = [(b["updates"] - a["updates"]) / (b["cpu"] - a["cpu"]) for a, b in itertools.pairwise(rows[1:])]
    reached = clock.reached
    return {
        "scores": rows,
        "target": target if np.isfinite(target) else None,
        "updates_per_second": float(np.median(between)) if between else None,
        "cpu_to_score": reached["cpu"] if reached else None,
        "env_steps_to_score": reached["env_steps"] if reached else None,
        "compile_seconds": rows[-1]["compile"],
    }


# Ours


def _ours(algo: str, task: Task, seed: int, watch: Watch) -> None:
    from bench.studies.known import settings_of
    from jaxrl.runtime.build import build_run, compile_run
    from jaxrl.runtime.config import changed
    from jaxrl.runtime.policy import Policy
    from jaxrl.runtime.presets import base
    from jaxrl.runtime.program import Program
    from jaxrl.runtime.train_state import Position

    name, settings = settings_of(task, algo)
    settings |= {"total_env_steps": task.steps, "devices": 1, "eval_every": 0}
    if algo != "ppo":  # after random steps, all updates that they are worth would follow
        settings |= {"random_steps": 0, "learning_starts": task.random_steps}
    run = build_run(changed(base(name, None, task.env), settings, "the peers"))
    compiled, phases, envs = compile_run(run, None, lambda sentence: None), run.algo.phases, run.trainer.layout.num_envs
    assert compiled.start is not None
    state, position = compiled.start(run.trainer.keys(seed), None), Position()
    while any(left := position.remaining(phases, envs, task.steps)):
        index = next(n for n, number in enumerate(left) if number)
        if index != position.phase:
            position = dataclasses.replace(position, phase=index, iteration=0)
            state = dataclasses.replace(state, phase=np.int32(index), iteration=np.uint32(0))
        block, phase = compiled.blocks[index], phases[index]
        assert isinstance(block, Program)
        number = min(left[index], run.config.run.block_iterations)
        if phase.steps:
            missing = watch.every - position.env_steps % watch.every
            number = min(number, -(-missing // (phase.steps * envs)))
        state, metrics = block(state, np.int32(number))
        jax.block_until_ready(metrics)
        position = position.after(phase, envs, number)
        if phase.steps and position.env_steps % watch.every < phase.steps * envs:
            policy = Policy(run.env.env, run.algo, run.algo.policy(state.algo), config=run.config)

            def act(carry: Any, timestep: Any, key: Any, policy: Policy = policy) -> tuple[Any, Any]:
                return policy(timestep.observation, carry=carry)

            if watch.evaluate(position.env_steps, position.updates, act):
                return


# Other libraries


def _brax(algo: str, task: Task, seed: int, watch: Watch) -> None:
    known_peers.brax_sac(task, seed, watch)


def _sb3(algo: str, task: Task, seed: int, watch: Watch, library: str) -> None:
    settings: dict[str, Any] | None = None
    if algo == "ppo":
        settings = {
            "n_steps": STEPS, "batch_size": task.batch_size, "n_epochs": EPOCHS, "gae_lambda": 0.95, "clip_range": 0.2,
            "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5,
        }  # fmt: skip
        passes = watch.evaluate  # their counter holds epochs
        watch = Watch(watch.every, lambda steps, epochs, act: passes(steps, epochs * MINIBATCHES, act))
    known_peers.sb3(task, seed, watch, library=library, algo=algo.upper(), settings=settings)


def _rejax(algo: str, task: Task, seed: int, watch: Watch) -> None:
    """Train with Rejax, one call for the steps between two evaluations."""
    rejax, nets = known_peers.module("rejax"), known_peers.module("rejax.networks")
    common = {
        "env": task.gymnasium, "learning_rate": task.learning_rate, "gamma": task.gamma, "num_envs": task.num_envs,
        "eval_freq": watch.every, "total_timesteps": watch.every, "skip_initial_evaluation": True,
    }  # fmt: skip
    sizes, name = (task.hidden_size,) * 2, algo.upper()
    if algo == "ppo":
        own: dict[str, Any] = {
            "num_steps": STEPS, "num_minibatches": MINIBATCHES, "num_epochs": EPOCHS, "max_grad_norm": 0.5,
            "agent_kwargs": {"activation": "tanh", "hidden_layer_sizes": sizes},
        }  # fmt: skip
    else:
        own = {
            "num_epochs": task.num_envs, "buffer_size": task.steps, "fill_buffer": task.random_steps,
            "batch_size": task.batch_size, "polyak": (1 - task.tau) ** task.num_envs,  # the target moves once a step
        }  # fmt: skip
    if algo == "sac":
        own["hidden_layer_sizes"] = sizes
    elif algo == "td3":
        own["exploration_noise"] = 0.1 * 2  # of a box from -2 to 2
    learner = getattr(rejax, name).create(**common, **own)
    learner = learner.replace(eval_callback=lambda learner, state, key: ())
    if algo == "td3":  # which has no setting for the size
        low, high = -2.0, 2.0
        actor = nets.DeterministicPolicy(1, (low, high), hidden_layer_sizes=sizes, activation=jax.nn.relu)
        learner = learner.replace(actor=actor, critic=nets.QNetwork(hidden_layer_sizes=sizes, activation=jax.nn.relu))
    first = jax.jit(learner.init_state)(jax.random.PRNGKey(seed))
    more = jax.jit(lambda state: learner.train(train_state=state)[0]).lower(first).compile()
    state, steps = first, 0
    while steps < task.steps:
        state = jax.block_until_ready(more(state))
        steps = int(state.global_step)
        updates = steps // (ENVS * STEPS) * EPOCHS * MINIBATCHES if algo == "ppo" else steps - task.random_steps
        if watch.evaluate(steps, max(updates, 0), _greedy(learner, state, algo)):
            return


def _greedy(learner: Any, state: Any, algo: str) -> Act:
    """Return Rejax's policy without its noise."""

    actor, params = learner.actor, state.actor_ts.params

    @jax.jit
    def chosen(observation: Any) -> Any:
        if algo == "td3":
            return actor.apply(params, observation)
        drawn = actor.apply(params, observation, method="_action_dist")
        return drawn.mode() if algo == "ppo" else actor.action_loc + jnp.tanh(drawn.loc) * actor.action_scale

    return lambda carry, timestep, key: (chosen(timestep.observation[:, 0])[:, None], carry)


SCRIPTS = {"sac": "sac_continuous_action", "td3": "td3_continuous_action", "ppo": "ppo"}


def _cleanrl(algo: str, task: Task, seed: int, watch: Watch) -> None:
    """Run a script of CleanRL's repository, and evaluate its networks where it reports its losses."""
    checkout = os.environ.get("CLEANRL_REPOSITORY", "")
    script = os.path.join(checkout, "cleanrl", f"{SCRIPTS[algo]}.py")
    if not os.path.exists(script):
        raise Skipped("set CLEANRL_REPOSITORY to a checkout of github.com/vwxyzjn/cleanrl")
    torch = known_peers.module("torch")
    flags = {"seed": seed, "env-id": task.gymnasium, "total-timesteps": task.steps}
    if algo == "ppo":
        flags |= {"learning-rate": task.learning_rate, "num-envs": ENVS, "num-steps": STEPS}
        flags |= {"num-minibatches": MINIBATCHES, "update-epochs": EPOCHS}
    else:
        flags |= {"learning-starts": task.random_steps, "batch-size": task.batch_size, "buffer-size": task.steps}
        rates = ("policy-lr", "q-lr") if algo == "sac" else ("learning-rate",)
        flags |= dict.fromkeys(rates, task.learning_rate)
    seen = [0]

    class Writer:
        """Stands in the place of TensorBoard's."""

        def __init__(self, *_: Any) -> None: ...

        def add_text(self, *_: Any) -> None: ...

        def close(self) -> None: ...

        def add_scalar(self, name: str, value: Any, step: int) -> None:
            if not name.startswith("losses/") or step // watch.every == seen[0]:
                return
            seen[0] = step // watch.every
            script = sys._getframe(1).f_globals

            def act(carry: Any, timestep: Any, key: Any) -> tuple[Any, Any]:
                observation = torch.as_tensor(np.array(timestep.observation[:, 0]))
                with torch.no_grad():
                    if algo == "ppo":
                        return script["agent"].actor(observation).argmax(-1).numpy()[:, None], carry
                    found = script["actor"]
                    action = found.get_action(observation)[2] if algo == "sac" else found(observation)
                    return action.numpy()[:, None], carry

            updates = step // (ENVS * STEPS) * EPOCHS * MINIBATCHES if algo == "ppo" else step - task.random_steps
            if watch.evaluate(step, max(updates, 0), act):
                raise Stop

    fake: Any = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer
    sys.modules[fake.__name__] = fake
    sys.path.insert(0, checkout)
    sys.argv = [script, "--no-cuda", *(f"--{name}={value}" for name, value in flags.items())]
    sys.argv += ["--no-anneal-lr"] if algo == "ppo" else []
    with contextlib.suppress(Stop):
        runpy.run_path(script, run_name="__main__")


IMPORTS: dict[str, tuple[str, ...]] = {
    "ours": ("gymnax", "jaxrl.runtime.build"),
    "brax": ("brax.envs", "brax.training.agents.sac.train"),
    "sb3": ("torch", "stable_baselines3"),
    "sbx": ("sbx", "stable_baselines3"),
    "rejax": ("rejax",),
    "cleanrl": ("torch", "gymnasium", "tyro"),
}
LEARNERS: dict[str, Callable[[str, Task, int, Watch], None]] = {
    "ours": _ours,
    "brax": _brax,
    "sb3": functools.partial(_sb3, library="stable_baselines3"),
    "sbx": functools.partial(_sb3, library="sbx"),
    "rejax": _rejax,
    "cleanrl": _cleanrl,
}
