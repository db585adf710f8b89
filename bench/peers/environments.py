"""Environments as a worker steps them: random actions drawn in the program, auto-reset, observations made.

Every JAX environment runs in the same compiled loop over all copies at once. What is carried from step to step holds
the observation, so that the compiler keeps its computation. The others run one after another on the host.
"""

import contextlib
import dataclasses
import importlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

ALONE = "one copy at a time"  # why an environment has no figure for many copies
COPIES = 3  # what is carried: before, after, and the compiler's temporaries


class Skipped(Exception):
    """Says in one sentence why something is not measured."""


@dataclasses.dataclass
class Measured:
    """An environment that has been compiled."""

    # makes a number of steps of all copies, and waits for them; in JAX it returns what is carried
    advance: Callable[[int], Any]
    # copies, agents: numbers
    copies: int
    agents: int
    # "compile_seconds", "bytes_per_copy" (state and last observation) and "temporary_bytes_per_copy"
    facts: dict[str, float] = dataclasses.field(default_factory=dict)
    steps: int = 1

    def sample(self, min_seconds: float) -> dict[str, float]:
        """Measure at least this many CPU seconds: {"env_steps", "cpu", "wall"}."""
        while True:
            wall = time.perf_counter()
            cpu = time.process_time()
            self.advance(self.steps)
            wall = time.perf_counter() - wall
            cpu = time.process_time() - cpu
            if cpu >= 0.7 * min_seconds:
                return {"env_steps": self.steps * self.copies, "cpu": cpu, "wall": wall}
            self.steps = max(2 * self.steps, int(self.steps * min_seconds / max(cpu, 1e-4)) if cpu > 0.01 else 0)


def open_environment(peer: str, name: str, copies: int, limit: float) -> Measured:
    """Return a peer's environment, compiled. Raises Skipped: it does not fit, or it only runs one copy."""
    if peer in HOST:
        if copies > 1:
            raise Skipped(ALONE)
        return Measured(*HOST[peer](name))
    if peer == "pufferlib":
        return _puffer(name, copies)
    reset, step, agents = GAMES[peer](name, copies)
    return compile_game(reset, step, copies, agents, limit)


# JAX

Game = tuple[Callable[[Any], Any], Callable[[Any, Any], Any], int]  # key -> carry; carry, key -> carry; agents


def compile_game(reset: Any, step: Any, copies: int, agents: int, limit: float) -> Measured:
    """Return a game, compiled. Raises Skipped: it does not fit into `limit` bytes."""
    import jax

    key = jax.random.PRNGKey(0)
    shapes = jax.eval_shape(reset, key)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    if COPIES * size > limit:
        raise Skipped(f"needs about {COPIES * size / 2**30:.0f} GiB")

    def run(carry: Any, key: Any, steps: Any) -> Any:
        return jax.lax.fori_loop(0, steps, lambda i, carry: step(carry, jax.random.fold_in(key, i)), carry)

    began = time.process_time()
    start = jax.jit(reset).lower(key).compile()
    program: Any = jax.jit(run, donate_argnums=0).lower(shapes, key, np.int32(1)).compile()
    took = time.process_time() - began
    held = [start(key)]
    counter = [0]

    def advance(steps: int) -> Any:
        counter[0] += 1
        held[0] = jax.block_until_ready(program(held[0], jax.random.PRNGKey(counter[0]), np.int32(steps)))
        return held[0]

    usage = program.memory_analysis()
    facts = {"compile_seconds": took, "bytes_per_copy": size / copies}
    if usage is not None:
        facts["temporary_bytes_per_copy"] = usage.temp_size_in_bytes / copies
    return Measured(advance, copies, agents, facts)


SNAKES: dict[str, Any] = {"observation": "obs26", "reward": "original", "masks": False}  # as published
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "coverage q=7": ("coverage", {"q": 7}),
    "coverage q=57": ("coverage", {"q": 57}),
    "snakes": ("snakes_3v3", SNAKES | {"opponent": "2"}),
    "snakes both teams": ("snakes_3v3", SNAKES | {"opponent": "outside"}),
    "reach": ("reach", {"goals": "pool"}),
}


def ours(name: str, copies: int, **settings: Any) -> Game:
    """Return one of our environments: a row of OURS, or any registered name with its settings."""
    import jax
    import jax.numpy as jnp

    import envs_jax
    from envs_jax.base import Discrete
    from envs_jax.batch import batched

    env_name, usual = OURS.get(name, (name, {}))
    env = batched(envs_jax.make(env_name, **usual | settings))
    action = env.spec.action
    agents = env.spec.num_agents

    def reset(key: Any) -> Any:
        return env.reset(jax.random.split(jax.random.wrap_key_data(key), copies))

    def step(carry: Any, key: Any) -> Any:
        state, timestep = carry
        if not isinstance(action, Discrete):
            drawn = jax.random.uniform(key, (copies, agents, *action.shape), minval=action.low, maxval=action.high)
        elif timestep.action_mask is None:
            drawn = jax.random.randint(key, (copies, agents), 0, action.n)
        else:
            drawn = jax.random.categorical(key, jnp.where(timestep.action_mask, 0.0, -jnp.inf))
        return env.step(state, timestep, drawn.astype(action.dtype))

    return reset, step, agents


def _gymnax(name: str, copies: int) -> Game:
    import gymnax
    import jax

    env, params = gymnax.make(name)
    act = jax.vmap(env.action_space(params).sample)

    def reset(key: Any) -> Any:
        observation, state = jax.vmap(env.reset, (0, None))(jax.random.split(key, copies), params)
        return state, (observation, *_like(jax, env, observation, state, params, copies))

    def step(carry: Any, key: Any) -> Any:
        keys = jax.random.split(key, copies)
        observation, state, *end, _ = jax.vmap(env.step, (0, 0, 0, None))(keys, carry[0], act(keys), params)
        return state, (observation, *end)

    return reset, step, 1


def _like(jax: Any, env: Any, observation: Any, state: Any, params: Any, copies: int) -> Any:
    """Return reward and ends of a step, as zeros."""
    keys = jax.random.split(jax.random.PRNGKey(0), copies)
    actions = jax.vmap(env.action_space(params).sample)(keys)
    shapes = jax.eval_shape(jax.vmap(env.step, (0, 0, 0, None)), keys, state, actions, params)
    return tuple(jax.numpy.zeros(x.shape, x.dtype) for x in shapes[2:-1])


def _jumanji(name: str, copies: int) -> Game:
    import jax
    import jumanji
    from jumanji.wrappers import AutoResetWrapper, VmapWrapper

    env = VmapWrapper(AutoResetWrapper(jumanji.make(name)))

    def reset(key: Any) -> Any:
        return env.reset(jax.random.split(key, copies))

    def step(carry: Any, key: Any) -> Any:
        return env.step(carry[0], jax.random.randint(key, (copies,), 0, env.action_spec.num_values))

    return reset, step, 1


def _jaxmarl(name: str, copies: int) -> Game:
    import jax
    import jaxmarl

    env = jaxmarl.make(name)
    space = env.action_space(env.agents[0])

    def play(state: Any, key: Any) -> Any:
        keys = jax.random.split(key, copies)
        drawn = jax.random.randint(key, (env.num_agents, copies), 0, space.n)
        actions = dict(zip(env.agents, drawn, strict=True))
        observation, state, reward, done, _ = jax.vmap(env.step)(keys, state, actions)
        return state, (observation, reward, done)

    def reset(key: Any) -> Any:
        observation, state = jax.vmap(env.reset)(jax.random.split(key, copies))
        shapes = jax.eval_shape(play, state, key)[1]
        return state, (observation, *jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), shapes[1:]))

    return reset, lambda carry, key: play(carry[0], key), env.num_agents


GAMES: dict[str, Callable[[str, int], Game]] = {
    "ours": ours, "gymnax": _gymnax, "jumanji": _jumanji, "jaxmarl": _jaxmarl,
}  # fmt: skip


# On the host

Host = tuple[Callable[[int], None], int, int]


def _numpy(name: str) -> Host:
    import envs_jax
    from bench import baselines

    env_name, settings = OURS[name]
    env: Any = envs_jax.make(env_name, **settings)
    entry = baselines.find(env_name)
    assert entry is not None
    played = entry.baseline({f.name: getattr(env, f.name) for f in dataclasses.fields(env) if f.init}, "random", 0)
    played.reset()

    def advance(steps: int) -> None:
        for _ in range(steps):
            action = played.act()
            played.observe(action)
            if played.step(action):
                played.reset()

    return advance, 1, env.spec.num_agents


def _metaworld(name: str) -> Host:
    import gymnasium
    import metaworld  # noqa: F401 registers its environments

    env = gymnasium.make("Meta-World/MT1", env_name=name)
    env.reset(seed=0)

    def advance(steps: int) -> None:
        for _ in range(steps):
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()

    return advance, 1, 1


def _jidi(name: str) -> Host:
    """Return the game with what its trainer computes each step: 26 values, a greedy opponent."""
    checkout = os.environ.get("JIDI_REPOSITORY", "")
    if not os.path.exists(os.path.join(checkout, "env", "snakes.py")):
        raise Skipped("set JIDI_REPOSITORY to a checkout of github.com/jidiai/Competition_3v3snakes")
    sys.path[:0] = [checkout, os.path.join(checkout, "rl_trainer")]
    common = importlib.import_module("common")
    game = importlib.import_module("env.chooseenv").make(name)
    random.seed(0)
    np.random.seed(0)
    height, width = game.board_height, game.board_width
    held = [game.reset()[0]]

    def advance(steps: int) -> None:
        for _ in range(steps):
            common.get_observations(held[0], [0, 1, 2], 26, height, width)
            board = np.squeeze(np.array(common.make_grid_map(width, height, held[0][1], snakes := _snakes(held[0]))), 2)
            greedy = common.greedy_snake(board, held[0][1], list(snakes.values()), width, height, [3, 4, 5])
            actions = np.concatenate([np.random.randint(4, size=3), greedy]).astype(float)
            state, _, done, _, _ = game.step(game.encode(actions))
            held[0] = (game.reset() if done else state)[0]

    return advance, 1, 3


def _snakes(state: Any) -> dict[int, Any]:
    return {key: state[key] for key in range(2, 8)}


HOST: dict[str, Callable[[str], Host]] = {"numpy": _numpy, "metaworld": _metaworld, "jidi": _jidi}


def make_puffer(copies: int, vision: int = 5) -> Any:
    """Return PufferLib's snake, which sees as many cells in all directions; one object steps all copies."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # where its import leaves a link
        module: Any = importlib.import_module("pufferlib.ocean.snake.snake")
    # Walls as wide as the view surround 20 x 10 cells, the board of our snakes.
    width, height = 20 + 2 * vision, 10 + 2 * vision
    return module.Snake(copies, width, height, num_snakes=6, num_food=5, vision=vision, max_snake_length=200)


def _puffer(name: str, copies: int) -> Measured:
    """Return PufferLib's snake; actions come from a table, as in its own measurement."""
    env = make_puffer(copies)
    before = env.reset()[0].copy()
    actions = np.random.default_rng(0).integers(0, 4, (64, 6 * copies), np.int32)
    env.step(actions[0])
    if (env.observations == before).all():
        raise Skipped("its steps change nothing")

    def advance(steps: int) -> None:
        for step in range(steps):
            env.step(actions[step % 64])

    size = 20 * 30 + 6 * 2 * 200 * 4 + env.observations.nbytes / copies  # board, snakes, views
    return Measured(advance, copies, 6, {"bytes_per_copy": size})
