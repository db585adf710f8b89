"""Exported agents: they see and decide as the JAX policy does, play by the original rules, or are refused."""

import ast
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import by_day

from bench.parity import agent_games
from bench.parity.snakes import stack
from bench.reference.snakes import oracle
from bench.reference.snakes.opponents import choose, play, scripted
from bench.reference.snakes.segments import from_segments
from envs_jax.base import make
from envs_jax.snakes import obs_full, teams, timesteps
from envs_jax.snakes.board import NOWHERE
from envs_jax.snakes.types import State
from jaxrl.algos.coma import Coma
from jaxrl.algos.ddpg import Ddpg, masked_softmax
from jaxrl.cli import export
from jaxrl.cli.flags import parse
from jaxrl.common.errors import UserError
from jaxrl.integrations.standalone import AGENT, SUBMISSION, jidi_files, jidi_settings, source
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.runtime import run_directory
from jaxrl.runtime.build import build_run
from jaxrl.runtime.checkpoint import Checkpoints
from jaxrl.runtime.policy import Policy

PLAYED, BARED, DRAWN = 480, 20, 80
MODERN = {"first_layer": "relu", "layer_norm": True, "initializer": "he", "scale_observation": True, "depth": 3}
CASES: dict[str, tuple[str, str, int, dict[str, Any]]] = {  # environment, observation, careful_masks, algorithm
    "3v3 obs26": ("snakes_3v3", "obs26", 0, {"masking": False}),
    "3v3 obs30": ("snakes_3v3", "obs30", 0, {"masking": False, "network": "bicnet"}),
    "3v3 obs35": ("snakes_3v3", "obs35", 0, {"masking": False}),
    "3v3 obs_full": ("snakes_3v3", "obs_full", 0, MODERN),
    "3v3 obs_heading": ("snakes_3v3", "obs_heading", 10, MODERN),
    "1v1 obs26": ("snakes_1v1", "obs26", 0, {"layer_norm": True, "network": "bicnet"}),
    "1v1 obs_full": ("snakes_1v1", "obs_full", 4, MODERN | {"network": "bicnet"}),
    "1v1 obs_heading": ("snakes_1v1", "obs_heading", 4, MODERN | {"network": "bicnet"}),
}


def algorithm(env: Any, **settings: Any) -> Ddpg:
    return Ddpg(env.spec, DataParallel(1), **{"hidden_size": 32, "batch_size": 8, "buffer_size": 64} | settings)


def init_params(algo: Ddpg, seed: int = 0) -> Any:
    """Parameters of the actor, made in one program."""
    return jax.jit(lambda key: algo.policy(algo.init(key, None)))(jax.random.key(seed))


def export_agent(out: Path, env: Any, algo: Ddpg, params: Any, greedy: bool = False, search: bool = False) -> Any:
    """The agent's module, loaded as the platform would."""
    out.mkdir(exist_ok=True)
    for name, content in jidi_files(env, algo, params, greedy, search).items():
        (out / name).write_bytes(content)
    return agent_games.load_agent(out)


def play_states(settings: oracle.Settings, count: int) -> list[oracle.State]:
    """States of games between scripted players of several strengths, one of which plays at random now and then."""
    rng, states = np.random.default_rng(1), []
    levels: list[Any] = [(2, 2), (0, 2), ("evasion", 1), (0, 0), (4, 3)]
    while len(states) < count:
        game = oracle.Game(settings, rng)
        pair = levels[len(states) // settings.max_step % len(levels)]
        while not game.done and len(states) < count:
            states.append(game.state)
            snakes = [settings.team(side) for side in (0, 1)]
            game.step([a for side in (0, 1) for a in choose(game.state, settings, snakes[side], pair[side], rng)])
    return states


def heading(state: oracle.State, settings: oracle.Settings) -> list[int]:
    """The way from the second segment to the head."""
    return [
        next((d for d in range(4) if body and settings.neighbour(body[1], d) == body[0]), 0) for body in state.bodies
    ]


def reference(
    env: Any, settings: oracle.Settings, states: list[oracle.State], directions: list[list[int]] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Observations [2, N, A, F] and masks bool[2, N, A, 4] of the JAX environment in both sides.

    Directions are those from necks to heads if they are not given. Snakes that could not respawn are nowhere: the
    environment keeps the place of their last head, and then ends.
    """
    directions = [heading(s, settings) for s in states] if directions is None else directions
    games = stack(
        [
            from_segments(env.board, s.bodies, way, s.beans, env.beans, s.step_count - 1)
            for s, way in zip(states * 2, directions * 2, strict=True)
        ]
    )
    places = {name: np.where(games.length > 0, getattr(games, name), NOWHERE) for name in ("head", "tail")}
    games = dataclasses.replace(games, **places)
    second = np.arange(2 * len(states)) >= len(states)
    zeros = np.zeros(2 * len(states), np.int32)

    @jax.jit
    def look(state: State) -> tuple[Any, Any]:
        game = teams.learner_view(env, state)
        missing = game.length[: env.num_agents, None] == 0  # a snake that may as well choose anything
        return (
            timesteps.for_all_agents(env, timesteps.observe, game),
            timesteps.for_all_agents(env, timesteps.open_directions, game) | missing,
        )

    views = look(State(zeros.astype(np.float32), games, zeros, second))
    observations, masks = (np.moveaxis(np.asarray(x), -1, 0) for x in views)
    return observations.reshape(2, len(states), *observations.shape[1:]), masks.reshape(
        2, len(states), *masks.shape[1:]
    )


def strip_states(states: list[oracle.State], most_beans: int) -> list[oracle.State]:
    """Some of the states, each without a snake and with fewer beans."""
    stripped = []
    for index, state in enumerate(states[:: len(states) // BARED][:BARED]):
        bodies = [[] if k == index % len(state.bodies) else body for k, body in enumerate(state.bodies)]
        stripped.append(dataclasses.replace(state, bodies=bodies, beans=state.beans[: index % (most_beans + 1)]))
    return stripped


def draw_body(settings: oracle.Settings, free: set[oracle.Cell], length: int, rng: np.random.Generator) -> Any:
    """A body at random, shorter where it gets stuck; some of three cells are no path, as after a respawn."""
    cells = sorted(free)
    body = [cells[rng.integers(len(cells))]]
    way = int(rng.integers(4))
    start, end = settings.neighbour(body[0], way), settings.neighbour(body[0], way ^ 1)
    if length == oracle.START_LENGTH and rng.random() < 0.3 and {start, end} <= free:
        return [body[0], start, end]
    while len(body) < length:
        around = [settings.neighbour(body[-1], d) for d in range(4)]
        ways = [cell for cell in around if cell in free and cell not in body]
        if not ways:
            break
        body.append(ways[rng.integers(len(ways))])
    return body if len(body) >= oracle.START_LENGTH else []


def draw_states(settings: oracle.Settings, count: int) -> list[oracle.State]:
    """States at random, of any step: crowded boards, long snakes, snakes that could not respawn, missing beans."""
    rng = np.random.default_rng(5)
    states = []
    for index in range(count):
        free = set(settings.cells())
        bodies = []
        for _ in range(settings.num_snakes):
            length = int(rng.choice([oracle.START_LENGTH, rng.integers(3, 12), rng.integers(12, 50)]))
            bodies.append(draw_body(settings, free, length, rng) if index % 4 or rng.random() < 0.8 else [])
            free -= set(bodies[-1])
        cells = sorted(free)
        beans = rng.permutation(len(cells))[: rng.integers(settings.num_beans + 1) if index % 2 else settings.num_beans]
        step = int(rng.integers(1, settings.max_step + 1))
        states.append(oracle.State(bodies, [0] * len(bodies), [cells[k] for k in beans], step))
    return states


AT_NIGHT = {"3v3 obs26", "3v3 obs35", "1v1 obs_full", "1v1 obs_heading"}  # each of whose parts is in another case


@pytest.mark.parametrize("case", by_day(CASES, {*CASES} - AT_NIGHT))
def test_agent_equals_the_jax_policy(case: str, tmp_path: Path) -> None:
    """Observations, masks, logits and drawn actions on some 300 states, each in both sides."""
    name, layout, length, options = CASES[case]
    env = make(name, observation=layout, side="both", masks=True, careful_masks=length)
    settings = oracle.CONFIGURATIONS[name]
    states = play_states(settings, PLAYED)
    pointed = [heading(s, settings) == s.directions for s in states]
    assert 0.8 < np.mean(pointed) < 1  # some respawns point into the neck
    states = [s for index, s in enumerate(states) if index % 2 == 0 or not pointed[index]]
    states += strip_states(states, settings.num_beans) + draw_states(settings, DRAWN)
    observations, masks = reference(env, settings, states)
    algo = algorithm(env, **options)
    params = init_params(algo, 3)
    params = jax.tree.map(
        lambda x: jnp.float32(3 * np.asarray(x) + 0.01 * np.cos(np.arange(x.size)).reshape(x.shape)), params
    )

    @jax.jit
    def policy(params: Any, observation: Any, masks: Any) -> tuple[Any, Any]:
        logits = algo.outputs("actor", params, observation.reshape(-1, *observation.shape[2:])).reshape(masks.shape)
        return logits, jnp.log(masked_softmax(logits, masks if algo.masking else None))

    logits, chances = map(np.asarray, policy(params, observations, masks))
    assert len(np.unique(np.argmax(logits, -1))) == 4
    agent, rng, bound = export_agent(tmp_path, env, algo, params), np.random.default_rng(2), 0
    for side, index in np.ndindex(2, len(states)):
        snake = int(rng.choice(settings.team(side)))
        observation = agent_games.observation(states[index], settings, snake, states[index].directions)
        steps = states[index].step_count - 1
        board = agent.Board.read(observation, agent.POLICY.settings, steps)
        team = agent.POLICY.team(board)
        np.testing.assert_allclose(team, observations[side, index], rtol=1e-6, atol=1e-6)  # integers are equal
        assert [agent.POLICY.mask(board, i) for i in range(board.half)] == masks[side, index].tolist()
        np.testing.assert_allclose(agent.POLICY.logits(team), logits[side, index], rtol=1e-4, atol=1e-4)
        np.random.seed(index)
        noise, member = np.random.gumbel(size=4), snake % settings.team_size
        sums = chances[side, index, member] + noise
        bound += np.argmax(sums) != np.argmax(logits[side, index, member] + noise)
        np.random.seed(index)
        agent.CLOCK.steps = steps - 1  # at the call before
        chosen = agent.my_controller(observation, None, False)
        second, first = np.sort(sums)[-2:]
        if first - second > 1e-3:
            assert chosen == [[int(action == np.argmax(sums)) for action in range(4)]]
    assert (bound > len(states) // 5) == algo.masking


def test_greedy_takes_the_best_action(tmp_path: Path) -> None:
    env, settings = make("snakes_1v1", masks=False), oracle.CONFIGURATIONS["snakes_1v1"]
    algo = algorithm(env)
    params = init_params(algo)
    drawing, greedy = (export_agent(tmp_path / str(g), env, algo, params, greedy=g) for g in (False, True))
    observation = agent_games.observation(play_states(settings, 5)[4], settings, 1, [0, 0])
    logits = greedy.POLICY.logits(greedy.POLICY.team(greedy.Board.read(observation, greedy.POLICY.settings, 4)))[0]
    best = [[int(action == np.argmax(logits)) for action in range(4)]]
    assert all(greedy.my_controller(observation, None) == best for _ in range(20))
    np.random.seed(0)
    drawn = np.sum([drawing.my_controller(observation, None) for _ in range(2000)], axis=0)[0]
    expected = 2000 * np.exp(logits) / np.exp(logits).sum()
    assert np.sum((drawn - expected) ** 2 / expected) < 16.3  # 0.999 quantile of chi-squared, 3 degrees of freedom


def hand_made(env: Any, algo: Ddpg) -> Any:
    """Weights that avoid blocked cells and go to the nearest bean: a policy anyone can read off the observation."""
    params = jax.tree.map(np.zeros_like, init_params(algo))
    kernel, out = params["params"]["fc1_kernel"], params["params"]["out_kernel"]
    blocked = obs_full.PLANES * obs_full.SIDE**2 + (4 if env.observation == "obs_full" else 1)
    bean = blocked + 4 + 1
    for d in range(4):
        kernel[blocked + d, d] = -10
        out[d, d] = 1
    kernel[bean, 0], kernel[bean, 1] = -1 / env.width, 1 / env.width  # in shares of half the rows and columns
    kernel[bean + 1, 2], kernel[bean + 1, 3] = -1 / env.height, 1 / env.height
    return jax.tree.map(jnp.asarray, params)


@pytest.mark.parametrize("layout", by_day(["obs_full", "obs_heading"], ["obs_full"]))
def test_games_by_the_original_rules(layout: str, tmp_path: Path) -> None:
    """A policy that goes for beans and avoids walls of snakes beats random players in either side."""
    env = make("snakes_3v3", observation=layout, careful_masks=10 * (layout == "obs_heading"))
    algo = algorithm(env, hidden_size=4, depth=1)
    agent = export_agent(tmp_path, env, algo, hand_made(env, algo), greedy=True)
    seconds: list[float] = []
    policy = agent_games.wrap_controller(agent.my_controller, seconds)
    settings = oracle.Settings(max_step=60)
    for side in (0, 1):
        ours, theirs = agent_games.games(policy, scripted(0), settings, 5, side, seed=4)
        assert (ours > theirs).sum() >= 4 and ours.mean() > 8 + theirs.mean()
    assert len(seconds) == 2 * 5 * 60 * 3


def test_a_whole_game_on_the_platform(tmp_path: Path) -> None:
    """An agent of a preset plays one team of a game, and says what it would do in the other; both as the JAX policy.

    Only where the engine's direction of a snake does not follow from its body may they differ.
    """
    run = build_run(parse(["--config", "ddpg_hour", "--hidden_size", "32", "--side", "both", "--devices", "1"]).config)
    env, algo, settings = run.env.env, run.algo, oracle.CONFIGURATIONS["snakes_3v3"]
    params = jax.tree.map(lambda x: x + 0.3 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), init_params(algo))
    agent = export_agent(tmp_path, env, algo, params, greedy=True)
    platform = [agent_games.wrap_controller(agent.my_controller) for _ in range(2)]
    states: list[oracle.State] = []
    actions: list[list[int]] = []

    def record(game: oracle.Game, side: int) -> list[int]:
        if side == 0:
            states.append(game.state)
        actions.append(platform[side](game, side))
        return actions[-1] if side == 0 else scripted(2)(game, side)

    play(oracle.Game(settings, np.random.default_rng(0)), [record, record])
    directions = [heading(s, settings) for s in states]
    observations, masks = reference(env, settings, states * 2, [*directions, *(s.directions for s in states)])
    chosen, _ = Policy(env, algo, params)(observations.reshape(-1, 3, 286), action_mask=masks.reshape(-1, 3, 4))
    derived, stored = np.asarray(chosen).reshape(2, 2, len(states), 3).transpose(1, 2, 0, 3).reshape(2, -1, 6)
    played = np.reshape(actions, (-1, 6))
    np.testing.assert_array_equal(played, derived)
    pointed = [direction == s.directions for direction, s in zip(directions, states, strict=True)]
    assert len(states) == settings.max_step and 0.9 < np.mean(pointed) < 1
    assert max(len(body) for s in states for body in s.bodies) > 12
    np.testing.assert_array_equal(played[pointed], stored[pointed])


def test_the_agent_counts_the_steps_of_a_game(tmp_path: Path) -> None:
    """Once for each board, however many snakes it controls, and anew where the platform begins a game."""
    env, settings = make("snakes_1v1", max_steps=5), oracle.CONFIGURATIONS["snakes_1v1"]
    agent = export_agent(tmp_path, env, algorithm(env), init_params(algorithm(env)))
    states = play_states(settings, 8)
    seen = agent_games.observation(states[0], settings, 0, None)
    counts = []
    for last, state in [(None, states[0]), *((states[0].directions, s) for s in states), (None, states[3])]:
        for snake in (0, 1):
            shown = agent_games.observation(state, settings, snake, last)
            for k in (1, 2, 3):
                seen[k][:] = shown[k]  # the platform's own lists
            seen.update({name: shown[name] for name in ("last_direction", "controlled_snake_index")})
            counts.append(agent.CLOCK.read(seen, agent.POLICY.settings))
    assert counts == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5, 5, 5, 5, 0, 0]


def test_shares_are_rounded_as_in_training(tmp_path: Path) -> None:
    """For games of any length: hundredths that lie halfway between two integers are those of float32."""
    env = make("snakes_1v1")
    agent = export_agent(tmp_path, env, algorithm(env), init_params(algorithm(env)))
    share = jax.jit(obs_full.share, static_argnums=1)
    for most in (7, 20, 50, 200, 312, 360):
        values = np.arange(-most - 1, most + 2)
        assert [agent.share(x, most) for x in values.tolist()] == np.asarray(share(values, most)).tolist()


def check_refusal(env: str, sentence: str, algo: type = Ddpg, **changes: Any) -> None:
    environment = make(env, **changes)
    sizes: Any = {"hidden_size": 4, "buffer_size": 64, "batch_size": 8} if algo is Ddpg else {}
    with pytest.raises(UserError, match=sentence) as caught:
        jidi_settings(environment, algo(environment.spec, DataParallel(8), **sizes), False, False)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_what_the_platform_cannot_run_is_refused() -> None:
    check_refusal("coverage", "the jidi format is for snakes, the run was trained on 'coverage'", Coma, q=5)
    check_refusal("snakes_3v3", "6 snakes in 2 teams, 8 x 20 cells and beans 5: train on snakes_3v3", height=8)
    check_refusal("snakes_5p", "5 snakes in 1 team, 10 x 20 cells")
    check_refusal("snakes_1v1", "1v1 on 10 x 20|10 x 20 cells and beans 5", height=10, width=20)
    check_refusal("snakes_3v3", "10 x 20 cells and beans 3", beans=3)
    check_refusal("snakes_3v3", "plays both teams", opponent="outside")


def test_the_platform_heeds_masks_as_the_training_did() -> None:
    """Masks need an environment that has them, and a policy that heeds them."""
    for masks, masking in ((True, True), (True, False), (False, True)):
        env = make("snakes_3v3", masks=masks)
        assert jidi_settings(env, algorithm(env, masking=masking), False, False)["masking"] == (masks and masking)


RUN = "--config ddpg_competition --env snakes_1v1 --hidden_size 8 --batch_size 8 --buffer_size 800 --total_env_steps 8"
RUN += " --opponent 0 --stale_observation_bug false"


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a run on disk to a script that plays what was exported."""
    run = build_run(parse(f"{RUN} --devices 1".split()).config)
    folder = run_directory.create(tmp_path / "runs", "ddpg", "snakes_1v1", run.env.env.version)
    run_directory.write_config(folder, run.config.to_yaml())
    state = run.trainer.init(jax.random.key(0))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(1, state, {})
    out, words = tmp_path / "out", [str(folder), "--format", "jidi"]
    capsys.readouterr()
    for argv, sentence in (
        ([str(folder)], "say what to write: --format safetensors or stablehlo or onnx or numpy or jidi"),
        ([str(folder), "--search"], "say what to write: --format jidi, which --search is for"),
        ([str(folder), "--format", "jid"], "unknown format 'jid': did you mean 'jidi'?"),
        (words, "say where to write: --out DIR"),
        (["nowhere", *words[1:], "--out", str(out)], "nowhere does not exist"),
        ([*words, "--out", str(tmp_path / "runs" / "latest")], "choose another --out"),
    ):
        assert export.main(argv) in (1, 2)
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and sentence in error
    assert export.main([*words, "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["submission.py", "weights.npz"]
    assert (out / "submission.py").read_bytes() == source(SUBMISSION)
    agent, actor = agent_games.load_agent(out), run.algo.policy(state.algo)["params"]
    np.testing.assert_array_equal(agent.POLICY.weights["fc2_kernel"], actor["fc2_kernel"])


@pytest.mark.parametrize("path", [SUBMISSION, AGENT], ids=lambda path: path.stem)
def test_modules_are_joined_into_one_file(path: Path) -> None:
    """Their names differ, and Python 3.7 can read them."""
    tree = ast.parse(source(path), feature_version=(3, 7))
    names = [x.name for x in tree.body if isinstance(x, ast.FunctionDef | ast.ClassDef)]
    for line in tree.body:
        if isinstance(line, ast.Assign):
            names += [x.id for x in ast.walk(line) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
    assert len(names) == len(set(names)) > 10
    modules = [line.module for line in tree.body if isinstance(line, ast.ImportFrom) and line.module]
    assert not [module for module in modules if module.startswith("jaxrl")]


def test_the_agent_needs_numpy_alone(tmp_path: Path) -> None:
    """Without JAX, and without threads that nobody asked for."""
    env = make("snakes_1v1", observation="obs_full")
    algo = algorithm(env, network="bicnet")
    export_agent(tmp_path, env, algo, init_params(algo))
    script = (
        "import os, sys, submission; seen = {1: [[0, 0]], 2: [[2, 2], [2, 1], [2, 0]], 3: [[4, 4], [4, 5], [4, 6]], "
        "'board_width': 8, 'board_height': 6, 'controlled_snake_index': 3, 'last_direction': None}; "
        "print(sum(submission.my_controller(seen, [])[0]), sorted({'jax', 'jaxrl', 'envs_jax'} & {*sys.modules}), "
        "len(os.listdir('/proc/self/task')))"
    )
    words = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=words, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("1 [] 1", "")
