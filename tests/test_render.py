"""The verb `render`: the recorded episode is the evaluated one, every format holds every step, errors are sentences."""

import base64
import dataclasses
import io
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from envs_jax import viewing
from envs_jax.base import make
from jaxrl.cli import evaluate, render
from jaxrl.common.errors import UserError
from jaxrl.evaluation import records, reports
from jaxrl.evaluation.policies import PolicySet, load

SMALL = ["--q", "2", "--budget", "2", "--num_agents", "2"]


@pytest.fixture(scope="module")
def coverage() -> PolicySet:
    return load(None, "coverage", dict(make("coverage", q=2, budget=2, num_agents=2).__dict__))


@pytest.fixture(scope="module")
def episode(coverage) -> viewing.Record:
    """Episode 4 of "random", with invented mean curves of two policies."""
    names = ("entropy", "f1", "return")
    references = {policy: {name: np.full((4, 2), level) for name in names}
                  for policy, level in (("random", 0.9), ("ig", 0.5))}  # fmt: skip
    return records.record(coverage, "random", 4, 7, references)


def test_the_episode_is_the_evaluated_one(coverage, episode):
    ((_, curves),) = reports.rollout(coverage, ["random"], 6, seed=7)
    for name, curve in curves.items():
        np.testing.assert_array_equal(episode.curves[name], curve[:, 4], err_msg=name)
    assert episode.steps == 3 and episode.actions.shape == (3, 2)
    assert episode.states.maps.beliefs.shape == (4, 3, 17, 17)
    np.testing.assert_allclose(episode.rewards.cumsum(), episode.curves["return"], rtol=1e-5)


def test_early_ends_are_cut_off():
    corridor = load(None, "helpers.tiny:Corridor", {"num_agents": 1, "length": 4, "horizon": 9})
    record = records.record(corridor, "right", 0, 0)
    start = int(record.states.position[0, 0])
    assert record.steps == 4 - start < 9
    assert record.timesteps.terminated.tolist() == [False] * record.steps + [True]
    assert len(record.curves["return"]) == record.steps + 1


def test_page_needs_nothing_but_itself(coverage, episode):
    page = coverage.env.env.viewer().html(episode)
    assert not re.search(r"(https?:)?//\w", re.sub(r'"data:image/png;base64,[^"]+"', "", page))
    assert not re.search(r"<(link|iframe|script [^>]*src)|@import|fetch\(|XMLHttpRequest|url\(", page)
    assert "default-src 'none'" in page and "@" + "SCENE" not in page
    frames = re.findall(r'href="data:image/png;base64,([^"]+)"', page)
    assert len(frames) == episode.steps + 1 == 4
    for frame in frames:
        assert Image.open(io.BytesIO(base64.b64decode(frame))).size == (17, 17)
    data = json.loads(re.search(r"^const data = (.*);$", page, re.MULTILINE)[1])
    assert data["steps"] == 3 and data["step_labels"][3] == "4 measurements"
    np.testing.assert_allclose(data["curves"]["entropy"], episode.curves["entropy"], rtol=1e-5)
    assert {"random (mean)", "ig (mean)"} <= {shape[3] for shape in data["charts"]["entropy"] if shape[0] == "text"}


def test_frames_and_picture(coverage, episode):
    viewer = coverage.env.env.viewer()
    animation = Image.open(io.BytesIO(records.draw(viewer, episode, ".gif")))
    assert animation.n_frames == episode.steps + 1
    times = []
    for k in range(animation.n_frames):
        animation.seek(k)
        times.append(animation.info["duration"])
    assert times == [500, 500, 500, 2500]
    picture = Image.open(io.BytesIO(records.draw(viewer, episode, ".png"))).convert("RGB")
    assert picture.width > 1500
    assert len(picture.getcolors(maxcolors=10**7)) > 200  # something is drawn


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> str:
    """An evaluation of three policies, as text."""
    path, names = tmp_path_factory.mktemp("evaluated") / "numbers.json", "random,lawnmower_5,lawnmower"
    assert evaluate.main(["--env", "coverage", *SMALL, "--policy", names, "--episodes", "3", "--json", str(path)]) == 0
    return path.read_text()


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A directory; the verb draws scripted policies as if they were evaluated with the run in it."""
    parse = render.parse

    def with_run(*args):
        flags, read = parse(*args)
        return flags, lambda: dataclasses.replace(read(), run=tmp_path)

    monkeypatch.setattr(render, "parse", with_run)
    return tmp_path


@pytest.mark.slow
def test_html_through_the_verb_with_an_evaluation(evaluated, run, capsys):
    numbers, page = run / "evaluation.json", run / "mission.html"
    numbers.write_text(evaluated)
    argv = [*SMALL, "--policy", "random", "--out", str(page)]
    assert render.main(argv) == 0
    captured = capsys.readouterr()
    assert f"wrote {page}" in captured.out and not captured.err
    data = json.loads(re.search(r"^const data = (.*);$", page.read_text(), re.MULTILINE)[1])
    names = {shape[3] for shape in data["charts"]["entropy"] if shape[0] == "text" and shape[3].endswith(" (mean)")}
    assert names == {f"{name} (mean)" for name in json.loads(numbers.read_text())["policies"]}
    assert render.main([*SMALL[:2], "--budget", "3", "--policy", "random", "--out", str(page)]) == 0
    assert "made with other settings of the environment" in capsys.readouterr().err
    assert "(mean)" not in page.read_text()
    numbers.write_text("{}")
    assert render.main(argv) == 0
    assert "is not an evaluation that jaxrl.evaluate wrote" in capsys.readouterr().err


def test_means_of_games_come_from_an_evaluation_of_the_same_game(tmp_path):
    """Opponents may be others, each has matches of its own; a board of another size is another game."""
    one, other, wide = (
        load(None, "snakes_1v1", dict(make("snakes_1v1", **settings).__dict__))
        for settings in ({"opponent": "2"}, {"opponent": "0,1,2", "side": "both"}, {"width": 9})
    )
    path = tmp_path / "evaluation.json"
    matches = [
        {"first": first, "second": second, "score": {"mean": mean, "std": 1.0}, "win": {"mean": mean / 10, "std": 1.0}}
        for mean, (first, second) in enumerate(itertools.product(("sampled", "random"), ("level1", "level2")))
    ]
    report = {"env": "snakes_1v1", "env_settings": other.settings, "set": {"side": "both"}, "matches": matches}
    report |= {"policies": {}, "score": "score", "score_mode": "max"}
    path.write_text(json.dumps(report))
    assert records.read_evaluation(path, one, "random") == (
        {},
        {
            "level1": {"sampled": {"score": 0.0, "win": 0.0}, "random": {"score": 2.0, "win": 0.2}},
            "level2": {"sampled": {"score": 1.0, "win": 0.1}, "random": {"score": 3.0, "win": 0.3}},
        },
    )
    with pytest.raises(UserError, match="made with other settings"):
        records.read_evaluation(path, wide, "random")
    for broken in ("{}", "[1]", '{"env": 3', json.dumps({**report, "matches": [{"first": "a"}]})):
        path.write_text(broken)
        with pytest.raises(UserError, match="is not an evaluation"):
            records.read_evaluation(path, one, "random")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--policy", "ig"], 2, "say what to write: --out mission.html"),
        (["--policy", "ig", "--out", "x.htm"], 2, "cannot write '.htm' files; did you mean '.html'?"),
        (["--policy", "ig", "--out", "mission"], 2, "choose from: .gif, .html, .png"),
        (["--policy", "ig", "--out", "/no/such/folder/x.png"], 1, "cannot write /no/such/folder/x.png"),
        (["--out", "OUT/x.png"], 2, "without a run, --policy says who acts"),
        (["--policy", "greedy", "--out", "OUT/x.png"], 2, "policy 'greedy' needs a run"),
        (["--policy", "ig", "--episode", "-1", "--out", "OUT/x.png"], 2, "--episode must lie between 0"),
        (["--env", "helpers.tiny:Corridor", "--policy", "right", "--out", "OUT/x.gif"], 2, "has no viewer"),
        (["nowhere", "--out", "OUT/x.gif"], 2, "does not exist"),
    ],
)
def test_errors_are_one_sentence(argv, code, words, capsys, tmp_path: Path):
    assert render.main([word.replace("OUT", str(tmp_path)) for word in argv]) == code
    out, err = capsys.readouterr()
    assert words in err and err.startswith("error: ") and err.count("\n") == 1 and not out
    assert not list(tmp_path.iterdir())
