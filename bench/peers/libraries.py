"""Learners of other libraries for `bench.peers`, each a function of (algorithm, task, seed, watch).

github.com/google/brax, araffin/sbx, DLR-RM/stable-baselines3, keraJLi/rejax, vwxyzjn/cleanrl. All are optional.
CleanRL's learners are scripts: name a checkout in the environment variable CLEANRL_REPOSITORY.
"""

import contextlib
import functools
import importlib
import os
import runpy
import sys
import types
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import envs_jax
from bench.peers.environments import Skipped
from bench.peers.tasks import ENVS, EPOCHS, MINIBATCHES, STEPS, Act, Stop, Task, Watch
from envs_jax.base import Array, Box, Environment, TimeStep
from jaxrl.common.errors import UserError


def module(name: str) -> Any:
    """Import a module of another library. Raises UserError where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"this learner needs {name.partition('.')[0]}, which cannot be imported ({error})") from None


def train_brax(algo: str, task: Task, seed: int, watch: Watch) -> None:
    """Train Brax's SAC on our environment behind its interface."""
    trainer = module("brax.training.agents.sac.train")
    networks = module("brax.training.agents.sac.networks").make_sac_networks
    env = envs_jax.make(f"gymnax:{task.gymnasium}")
    acts = list[Act]()

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
        if steps and watch.evaluate(steps, steps - task.random_steps, acts[-1]):
            raise Stop

    # Brax 0.14.2 calls a function that jax has dropped.
    replicated = mock.patch.object(jax, "device_put_replicated", _replicate, create=True)
    with replicated, mock.patch.object(trainer.acting, "Evaluator", Evaluations), contextlib.suppress(Stop):
        trainer.train(
            environment=_brax_env(env),
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
            num_evals=1 + task.steps // watch.every,
            deterministic_eval=True,
            progress_fn=progress,
            max_devices_per_host=1,
        )


def _replicate(x: Any, devices: Sequence[Any]) -> Any:
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


def to_box(env: Environment, action: Any) -> Array:
    """Return the environment's actions [B, 1, n] for those in [-1, 1] [B, n]."""
    box = env.spec.action
    assert isinstance(box, Box)
    return (box.low + (jnp.clip(action, -1.0, 1.0) + 1.0) / 2.0 * (box.high - box.low))[:, None]


def train_sb3(algo: str, task: Task, seed: int, watch: Watch, library: str) -> None:
    """Train a learner of Stable-Baselines3, or of SBX, which has its interface; one call per step of all copies."""
    env = module("stable_baselines3.common.env_util").make_vec_env(task.gymnasium, task.num_envs, seed)
    per_update = 1
    if algo == "ppo":
        per_update = MINIBATCHES  # their counter holds epochs
        settings: dict[str, Any] = {
            "n_steps": STEPS, "batch_size": task.batch_size, "n_epochs": EPOCHS, "gae_lambda": 0.95, "clip_range": 0.2,
            "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5,
        }  # fmt: skip
    else:
        settings = {
            "buffer_size": task.steps, "learning_starts": task.random_steps, "batch_size": task.batch_size,
            "tau": task.tau, "train_freq": 1, "gradient_steps": task.num_envs,
        }  # fmt: skip
    if algo == "td3":
        noise = module("stable_baselines3.common.noise").NormalActionNoise
        size = env.action_space.shape
        settings |= {"policy_delay": 2, "action_noise": noise(np.zeros(size), np.full(size, 0.1))}
    model = getattr(module(library), algo.upper())(
        "MlpPolicy", env, learning_rate=task.learning_rate, gamma=task.gamma,
        policy_kwargs={"net_arch": [task.hidden_size] * 2}, seed=seed, **settings,
    )  # fmt: skip

    def act(carry: Any, timestep: TimeStep, key: Array | None) -> tuple[Array, Any]:
        action, _ = model.predict(np.asarray(timestep.observation[:, 0]), deterministic=True)
        return jnp.asarray(action)[:, None], carry

    class Evaluations(module("stable_baselines3.common.callbacks").BaseCallback):  # type: ignore[misc]
        def _on_step(self) -> bool:
            due = self.num_timesteps % watch.every < task.num_envs
            return not (due and watch.evaluate(self.num_timesteps, model._n_updates * per_update, act))

    model.learn(task.steps, callback=Evaluations())


def train_rejax(algo: str, task: Task, seed: int, watch: Watch) -> None:
    """Train with Rejax, one call for the steps between two evaluations."""
    rejax = module("rejax")
    nets = module("rejax.networks")
    common = {
        "env": task.gymnasium, "learning_rate": task.learning_rate, "gamma": task.gamma, "num_envs": task.num_envs,
        "eval_freq": watch.every, "total_timesteps": watch.every, "skip_initial_evaluation": True,
    }  # fmt: skip
    sizes = (task.hidden_size,) * 2
    if algo == "ppo":
        settings: dict[str, Any] = {
            "num_steps": STEPS, "num_minibatches": MINIBATCHES, "num_epochs": EPOCHS, "max_grad_norm": 0.5,
            "agent_kwargs": {"activation": "tanh", "hidden_layer_sizes": sizes},
        }  # fmt: skip
    else:
        settings = {
            "num_epochs": task.num_envs, "buffer_size": task.steps, "fill_buffer": task.random_steps,
            "batch_size": task.batch_size, "polyak": (1 - task.tau) ** task.num_envs,  # the target moves once a step
        }  # fmt: skip
    if algo == "sac":
        settings["hidden_layer_sizes"] = sizes
    elif algo == "td3":
        settings["exploration_noise"] = 0.1 * 2  # the box goes from -2 to 2
    learner = getattr(rejax, algo.upper()).create(**common, **settings)
    learner = learner.replace(eval_callback=lambda learner, state, key: ())
    if algo == "td3":  # which has no setting for the size
        low, high = -2.0, 2.0
        actor = nets.DeterministicPolicy(1, (low, high), hidden_layer_sizes=sizes, activation=jax.nn.relu)
        learner = learner.replace(actor=actor, critic=nets.QNetwork(hidden_layer_sizes=sizes, activation=jax.nn.relu))
    first = jax.jit(learner.init_state)(jax.random.PRNGKey(seed))
    more = jax.jit(lambda state: learner.train(train_state=state)[0]).lower(first).compile()
    state = first
    steps = 0
    while steps < task.steps:
        state = jax.block_until_ready(more(state))
        steps = int(state.global_step)
        updates = steps // (ENVS * STEPS) * EPOCHS * MINIBATCHES if algo == "ppo" else steps - task.random_steps
        if watch.evaluate(steps, max(updates, 0), _greedy(learner, state, algo)):
            return


def _greedy(learner: Any, state: Any, algo: str) -> Act:
    """Return Rejax's policy without its noise."""

    actor = learner.actor
    params = state.actor_ts.params

    @jax.jit
    def choose(observation: Any) -> Any:
        if algo == "td3":
            return actor.apply(params, observation)
        drawn = actor.apply(params, observation, method="_action_dist")
        return drawn.mode() if algo == "ppo" else actor.action_loc + jnp.tanh(drawn.loc) * actor.action_scale

    return lambda carry, timestep, key: (choose(timestep.observation[:, 0])[:, None], carry)


SCRIPTS = {"sac": "sac_continuous_action", "td3": "td3_continuous_action", "ppo": "ppo"}


def train_cleanrl(algo: str, task: Task, seed: int, watch: Watch) -> None:
    """Run a script of CleanRL's repository, and evaluate its networks where it reports its losses."""
    checkout = os.environ.get("CLEANRL_REPOSITORY", "")
    script = os.path.join(checkout, "cleanrl", f"{SCRIPTS[algo]}.py")
    if not os.path.exists(script):
        raise Skipped("set CLEANRL_REPOSITORY to a checkout of github.com/vwxyzjn/cleanrl")
    torch = module("torch")
    flags = {"seed": seed, "env-id": task.gymnasium, "total-timesteps": task.steps}
    if algo == "ppo":
        flags |= {"learning-rate": task.learning_rate, "num-envs": ENVS, "num-steps": STEPS}
        flags |= {"num-minibatches": MINIBATCHES, "update-epochs": EPOCHS}
    else:
        flags |= {"learning-starts": task.random_steps, "batch-size": task.batch_size, "buffer-size": task.steps}
        rates = ("policy-lr", "q-lr") if algo == "sac" else ("learning-rate",)
        flags |= dict.fromkeys(rates, task.learning_rate)
    counter = [0]

    class Writer:
        """Stands in the place of TensorBoard's."""

        def __init__(self, *_: Any) -> None: ...

        def add_text(self, *_: Any) -> None: ...

        def close(self) -> None: ...

        def add_scalar(self, name: str, value: Any, step: int) -> None:
            if not name.startswith("losses/") or step // watch.every == counter[0]:
                return
            counter[0] = step // watch.every
            script = sys._getframe(1).f_globals

            def act(carry: Any, timestep: Any, key: Any) -> tuple[Any, Any]:
                observation = torch.as_tensor(np.array(timestep.observation[:, 0]))
                with torch.no_grad():
                    if algo == "ppo":
                        return script["agent"].actor(observation).argmax(-1).numpy()[:, None], carry
                    actor = script["actor"]
                    action = actor.get_action(observation)[2] if algo == "sac" else actor(observation)
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
