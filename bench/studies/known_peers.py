"""Learners of other libraries for `bench.studies.known` and `bench.peers`.

Brax's SAC, SAC and TD3 of SBX and Stable-Baselines3, JaxMARL's IPPO: github.com/google/brax, araffin/sbx,
DLR-RM/stable-baselines3, FLAIROx/JaxMARL. The libraries are optional. JaxMARL's learners are scripts of its repository,
not of its package: name a checkout in the environment variable JAXMARL_REPOSITORY. They need distrax, hydra-core,
matplotlib and wandb.
"""

import contextlib
import functools
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from bench.studies.known_task import Act, Stop, Task, Trained, Watch, box_of, to_box
from envs_jax.base import Array, Discrete, Environment, TimeStep
from envs_jax.batch import batched, where
from jaxrl.common.errors import UserError


def module(name: str) -> Any:
    """Import a module of another library. Raises UserError where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"this learner needs {name.partition('.')[0]}, which cannot be imported ({error})") from None


def load(learner: str) -> None:
    """Import what a learner needs, so that no clock runs meanwhile. Raises UserError where it is missing."""
    for name in MODULES.get(learner, ()):
        module(name)


# Brax


def brax_sac(task: Task, seed: int, watch: Watch | None = None) -> Trained:
    """Train Brax's SAC on its own environment with its own wrappers, else on ours behind its interface."""
    trainer = module("brax.training.agents.sac.train")
    networks = module("brax.training.agents.sac.networks").make_sac_networks
    env = task.make()
    library, _, name = task.env.partition(":")
    if library == "brax":
        game = module("brax.envs").get_environment(name, **task.options)
    else:
        game = _brax_env(env)
    steps_of, acts = [0], list[Act]()

    class Evaluations:
        """In the place of Brax's evaluation, which plays episodes that the others do not play."""

        def __init__(self, env: Any, make_policy: Any, **kwargs: Any) -> None:
            self.make_policy = make_policy

        def run_evaluation(self, params: Any, training_metrics: Any) -> Any:
            policy = jax.jit(self.make_policy(params))

            def act(carry: Any, timestep: TimeStep, key: Array | None) -> tuple[Array, Any]:
                return to_box(env, policy(timestep.observation[:, 0], jax.random.PRNGKey(0))[0]), carry

            acts.append(act)
            return {}

    def progress(steps: int, metrics: Any) -> None:
        steps_of.append(steps)
        if watch is not None and steps and watch.evaluate(steps, steps - task.random_steps, acts[-1]):
            raise Stop

    # Brax 0.14.2 calls a function that jax has dropped.
    replicated = mock.patch.object(jax, "device_put_replicated", _replicated, create=True)
    with replicated, mock.patch.object(trainer.acting, "Evaluator", Evaluations), contextlib.suppress(Stop):
        trainer.train(
            environment=game,
            num_timesteps=task.steps,
            episode_length=env.spec.horizon,
            num_envs=task.num_envs,
            learning_rate=task.learning_rate,
            discounting=task.gamma,
            tau=task.tau,
            seed=seed,
            batch_size=task.batch_size,
            min_replay_size=task.random_steps,
            grad_updates_per_step=task.num_envs,
            network_factory=functools.partial(networks, hidden_layer_sizes=(task.hidden_size,) * 2),
            num_evals=1 + task.steps // watch.every if watch else 0,
            deterministic_eval=True,
            progress_fn=progress,
            max_devices_per_host=1,
        )
    return Trained(acts[-1], steps_of[-1], steps_of[-1] - task.random_steps)


def _replicated(x: Any, devices: Sequence[Any]) -> Any:
    """Return a copy of every array for each device, on a new first axis, as pmap takes them."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(devices), *jnp.shape(leaf))), x)


def _brax_env(env: Environment) -> Any:
    """Return one of our environments, of one agent, behind Brax's interface; its time limit is left to Brax."""
    base = module("brax.envs.base")

    class Game(base.Env):  # type: ignore[name-defined]
        def reset(self, rng: Array) -> Any:
            state, timestep = env.reset(jax.random.wrap_key_data(rng))
            return base.State(state, timestep.observation[0], jnp.float32(0), jnp.float32(0))

        def step(self, state: Any, action: Array) -> Any:
            inner, timestep = env.step(state.pipeline_state, to_box(env, action[None])[0])
            done = timestep.terminated.astype(jnp.float32)
            return state.replace(
                pipeline_state=inner, obs=timestep.observation[0], reward=timestep.reward[0], done=done
            )

        observation_size = property(lambda _: env.spec.observation.shape[0])
        action_size = property(lambda _: env.spec.action.shape[0])
        backend = property(lambda _: "none")

    return Game()


# SBX and Stable-Baselines3


def sb3(
    task: Task,
    seed: int,
    watch: Watch | None = None,
    *,
    library: str,
    algo: str,
    settings: Mapping[str, Any] | None = None,
) -> Trained:
    """Train a learner of Stable-Baselines3, or of SBX, which has its interface; one call per step of all copies.

    `settings` stand in the place of those of a replay learner.
    """
    own: dict[str, Any] = {
        "buffer_size": task.steps, "learning_starts": task.random_steps, "batch_size": task.batch_size,
        "tau": task.tau, "train_freq": 1, "gradient_steps": task.num_envs,
    }  # fmt: skip
    if task.gymnasium:
        env = module("stable_baselines3.common.env_util").make_vec_env(task.gymnasium, task.num_envs, seed)
    else:
        env = _sb3_env(task, seed)
    if algo == "TD3":
        noise = module("stable_baselines3.common.noise").NormalActionNoise
        size = env.action_space.shape
        own |= {"policy_delay": 2, "action_noise": noise(np.zeros(size), np.full(size, 0.1))}
    model = getattr(module(library), algo)(
        "MlpPolicy", env, learning_rate=task.learning_rate, gamma=task.gamma,
        policy_kwargs={"net_arch": [task.hidden_size] * 2}, seed=seed, **(own if settings is None else settings),
    )  # fmt: skip

    def act(carry: Any, timestep: TimeStep, key: Array | None) -> tuple[Array, Any]:
        action, _ = model.predict(np.asarray(timestep.observation[:, 0]), deterministic=True)
        return jnp.asarray(action)[:, None], carry

    class Evaluations(module("stable_baselines3.common.callbacks").BaseCallback):  # type: ignore[misc]
        def _on_step(self) -> bool:
            due = watch is not None and self.num_timesteps % watch.every < task.num_envs
            return not (due and watch is not None and watch.evaluate(self.num_timesteps, model._n_updates, act))

    model.learn(task.steps, callback=Evaluations())
    return Trained(act, model.num_timesteps, model._n_updates)


def _sb3_env(task: Task, seed: int) -> Any:
    """Return a task as a VecEnv of Stable-Baselines3, which resets copies in the step that ends them."""
    base, spaces = module("stable_baselines3.common.vec_env"), module("gymnasium.spaces")
    env = task.make()
    shape, action = env.spec.observation.shape, box_of(env)
    play = batched(env)
    reset, step, restart = jax.jit(play.reset), jax.jit(play.step), jax.jit(where)

    class Copies(base.VecEnv):  # type: ignore[name-defined]
        def __init__(self) -> None:
            space = spaces.Box(-np.inf, np.inf, shape, np.float32)
            bounds = spaces.Box(action.low, action.high, action.shape, np.float32)
            super().__init__(task.num_envs, space, bounds)
            self.actions: Any = None

        def reset(self) -> np.ndarray:
            self.state, self.timestep = reset(jax.random.split(jax.random.key(seed), task.num_envs))
            return np.asarray(self.timestep.observation[:, 0])

        def step_async(self, actions: np.ndarray) -> None:
            self.actions = jnp.asarray(actions)[:, None]

        def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
            self.state, timestep = step(self.state, self.timestep, self.actions)
            observation, reward = np.array(timestep.observation[:, 0]), np.asarray(timestep.reward[:, 0])
            terminated, truncated = np.asarray(timestep.terminated), np.asarray(timestep.truncated)
            done = terminated | truncated
            infos: list[dict[str, Any]] = [{} for _ in range(task.num_envs)]
            if done.any():
                for index in np.flatnonzero(done):
                    infos[index] = {
                        "terminal_observation": observation[index].copy(), "TimeLimit.truncated": bool(truncated[index])
                    }  # fmt: skip
                restarted, first = step(self.state, timestep, self.actions)  # resets those that have ended
                self.state, timestep = restart(jnp.asarray(done), (restarted, first), (self.state, timestep))
                observation[done] = np.asarray(first.observation[:, 0])[done]
            self.timestep = timestep
            return observation, reward, done, infos

        def close(self) -> None: ...

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
            return [None] * task.num_envs

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...

        def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
            return [None] * task.num_envs

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
            return [False] * task.num_envs

    return Copies()


# JaxMARL


def jaxmarl_ippo(task: Task, seed: int, watch: Watch | None = None) -> Trained:
    """Train IPPO of JaxMARL's repository with the settings published there, but for the total of steps and the map."""
    del watch  # the script is one program
    recurrent = "SMAX" in task.env
    script = "ippo_rnn_smax" if recurrent else "ippo_ff_mpe"
    code, config = _script(script)
    config |= {"TOTAL_TIMESTEPS": task.steps, "SEED": seed}
    if recurrent:
        config["MAP_NAME"] = task.options["map"]
    else:
        config["ENV_NAME"] = task.env.partition(":")[2]
    module("wandb").init(mode="disabled")
    result = jax.block_until_ready(jax.jit(code.make_train(config))(jax.random.PRNGKey(seed)))
    runner = result["runner_state"][0] if recurrent else result["runner_state"]
    params, action = runner[0].params, task.make().spec.action
    assert isinstance(action, Discrete)
    rollouts = task.steps // (config["NUM_STEPS"] * config["NUM_ENVS"])
    env_steps = rollouts * config["NUM_STEPS"] * config["NUM_ENVS"]
    updates = rollouts * config["UPDATE_EPOCHS"] * config["NUM_MINIBATCHES"]
    if recurrent:
        network = code.ActorCriticRNN(action.n, config=config)
    else:
        network = code.ActorCritic(action.n, config["ACTIVATION"])

    @jax.jit
    def logits(hidden: Any, timestep: TimeStep) -> tuple[Any, Array]:
        rows = timestep.observation.reshape(-1, timestep.observation.shape[-1])
        if not recurrent:
            return hidden, network.apply(params, rows)[0].logits
        mask = timestep.action_mask.reshape(len(rows), -1).astype(jnp.float32)
        hidden, policy, _ = network.apply(params, hidden, (rows[None], jnp.zeros((1, len(rows)), bool), mask))
        return hidden, policy.logits[0]

    def act(carry: Any, timestep: TimeStep, key: Array | None) -> tuple[Array, Any]:
        shape = timestep.observation.shape[:2]
        if carry is None and recurrent:
            carry = code.ScannedRNN.initialize_carry(math.prod(shape), config["GRU_HIDDEN_DIM"])
        carry, scores = logits(carry, timestep)
        chosen = jnp.argmax(scores, -1) if key is None else jax.random.categorical(key, scores)
        return chosen.reshape(shape), carry

    return Trained(act, env_steps, updates)


def _script(name: str) -> tuple[Any, dict[str, Any]]:
    """Import a script of the repository, and read its settings. Raises UserError: no repository."""
    repository = os.environ.get("JAXMARL_REPOSITORY", "")
    folder = os.path.join(repository, "baselines", "IPPO")
    if not repository or not os.path.exists(os.path.join(folder, f"{name}.py")):
        raise UserError(
            "set JAXMARL_REPOSITORY to a checkout of github.com/FLAIROx/JaxMARL: its learners are not in its package"
        )
    sys.path.insert(0, folder)
    import yaml

    with open(os.path.join(folder, "config", f"{name}.yaml")) as file:
        text = file.read().replace("${oc.env:WANDB_ENTITY}", '""')
    config = yaml.safe_load(text)  # which takes 1e7 for a word
    numbers = {key: float(x) for key, x in config.items() if isinstance(x, str) and re.fullmatch(r"\d+e\d+", x)}
    return module(name), config | numbers


MODULES = {
    "brax_sac": ("brax.training.agents.sac.train", "brax.envs"),
    "sbx_sac": ("sbx", "stable_baselines3"),
    "sbx_td3": ("sbx", "stable_baselines3"),
    "jaxmarl_ippo": ("jaxmarl", "distrax", "hydra", "matplotlib.pyplot", "wandb"),
}
LEARNERS: dict[str, Callable[..., Trained]] = {  # (task, seed, watch)
    "brax_sac": brax_sac,
    "sbx_sac": functools.partial(sb3, library="sbx", algo="SAC"),
    "sbx_td3": functools.partial(sb3, library="sbx", algo="TD3"),
    "jaxmarl_ippo": jaxmarl_ippo,
}
