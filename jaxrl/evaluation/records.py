"""Held-out episodes as pages, animations and pictures, beside the mean curves of other policies."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import short_repr
from envs_jax.viewing import Record, Viewer
from jaxrl.common.errors import UserError
from jaxrl.common.files import is_file
from jaxrl.evaluation.policies import LEARNED, EvalPolicy
from jaxrl.evaluation.reports import FILE
from jaxrl.evaluation.rollouts import held_out_key

_MOST_REPORT = 2**28  # bytes of an evaluation file
SUFFIXES = (".html", ".gif", ".png")
_REFERENCES = 3  # scripted policies, besides "random", whose mean curves are shown
_REST = 2.0  # seconds of the last frame of an animation


def record(
    subject: EvalPolicy,
    name: str,
    episode: int,
    seed: int,
    references: dict[str, dict[str, np.ndarray]] | None = None,
    final_means: dict[str, dict[str, dict[str, float]]] | None = None,
) -> Record:
    """Roll out one held-out episode, equal to episode number `episode` of `jaxrl.evaluate`.

    Args:
        subject: environment and policies.
        name: one of `subject.policies`.
        episode: its number.
        seed: of the held-out set.
        references, final_means: see `Record`.
    """
    fly = subject.evaluator([name], 1).record()
    flown = fly(subject.parameters(0), held_out_key(seed, "evaluation"), subject.context, jnp.int32(episode))
    states, timesteps, curves, actions = jax.tree.map(_fetched, flown)
    ends = np.flatnonzero(timesteps.terminated | timesteps.truncated)
    steps = int(ends[0]) if len(ends) else len(actions)  # rows after an early end are undefined
    states, timesteps, curves = jax.tree.map(lambda x: x[: steps + 1], (states, timesteps, curves))
    return Record(
        env=subject.env.env,
        title=subject.description,
        subtitle=f"policy {name} · held-out episode {episode}, seed {seed}",
        policy=name,
        states=states,
        timesteps=timesteps,
        actions=actions[:steps],
        curves=curves,
        references=references or {},
        final_means=final_means or {},
    )


def _fetched(leaf: jax.Array) -> Any:
    return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.asarray(leaf)


def read_references(path: Path, subject: EvalPolicy, name: str) -> dict[str, dict[str, np.ndarray]]:
    """Return mean curves of random, of the rendered policy and of the best scripted ones, from an evaluation file.

    Raises:
        UserError: not an evaluation, or one of other settings of the environment.
    """
    try:
        report = _read_report(path)
        about = report["env"], _plain(report["env_settings"]), report["steps"]
        wanted = subject.name, _plain(subject.settings), subject.env.spec.horizon
        policies = dict(report["policies"].items())
        if policies and about != wanted:
            raise UserError(f"{path} is about other settings of the environment: evaluate with these first")
        curves = {
            policy: {metric: _curve(values, wanted[2]) for metric, values in policies[policy].items()}
            for policy in subject.policies
            if policy in policies
        }
        finals = {policy: own[report["score"]][-1, 0] for policy, own in curves.items()}
        if report["score_mode"] not in ("min", "max"):
            raise ValueError("score_mode is neither min nor max")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {short_repr(str(error))}"
        raise UserError(f"{path} is not an evaluation that jaxrl.evaluate wrote ({reason})") from None
    sign = 1 if report["score_mode"] == "min" else -1
    scripted = [policy for policy in curves if policy not in (*LEARNED, "random") and np.isfinite(finals[policy])]
    scripted.sort(key=lambda policy: sign * finals[policy])
    chosen = dict.fromkeys(["random", *(["learned"] if subject.run else []), *scripted[:_REFERENCES], name])
    return {policy: curves[policy] for policy in chosen if policy in curves}


def _read_report(path: Path) -> Any:
    """Read a JSON file. Raises OSError, ValueError, RecursionError."""
    with path.open("rb") as file:
        content = file.read(_MOST_REPORT + 1)
    if len(content) > _MOST_REPORT:
        raise ValueError(f"it is larger than {_MOST_REPORT:,} bytes")
    return json.loads(content)


def _curve(values: Any, steps: int) -> np.ndarray:
    """Convert a metric's "mean" and "ci95" to float64[T + 1, 2]. Raises ValueError for anything else."""
    curve = np.array([values["mean"], values["ci95"]], np.float64).T
    if curve.shape != (steps + 1, 2):
        raise ValueError(f"a curve has the shape {curve.shape}, not {(steps + 1, 2)}")
    return curve


def read_final_means(path: Path, subject: EvalPolicy) -> dict[str, dict[str, dict[str, float]]]:
    """Return `Record.final_means` from the matches of an evaluation's JSON file.

    Empty where the file does not match: another environment, other settings, or no games.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    try:
        report = _read_report(path)
        free = {*report["set"], "opponent"}  # every opponent has matches of its own
        settings = [
            {name: value for name, value in one.items() if name not in free}
            for one in (report["env_settings"], _plain(subject.settings))
        ]
        if report["env"] != subject.name or settings[0] != settings[1]:
            return {}
        for match in report["matches"]:
            means = {metric: float(values["mean"]) for metric, values in match.items() if isinstance(values, dict)}
            if not np.all(np.isfinite(list(means.values()))):
                raise ValueError("a mean is not finite")
            found.setdefault(str(match["second"]), {})[str(match["first"])] = means
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}
    return found


def _plain(settings: dict[str, Any]) -> Any:
    return json.loads(json.dumps(settings))


def read_evaluation(
    given: Path | None, subject: EvalPolicy, name: str, say: Callable[[str], None] = lambda sentence: None
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, dict[str, dict[str, float]]]]:
    """Return `Record.references` and `Record.final_means` from an evaluation file.

    Args:
        given: the file; None: the run's own evaluation, if there is one that matches.
        subject: environment and policies.
        name: the rendered policy.
        say: receives a sentence if the run's own evaluation does not match.

    Raises:
        UserError: `given` is not an evaluation, or one of other settings of the environment.
    """
    path = given or (subject.run / FILE if subject.run else None)
    if path is None or (given is None and not is_file(path)):
        return {}, {}
    references = {}
    try:
        references = read_references(path, subject, name)
    except UserError as error:
        if given is not None:
            raise
        say(f"drawn without the curves of other policies, {error}")
    return references, read_final_means(path, subject) if subject.env.env.match_rules else {}


def with_opponents(subject: EvalPolicy) -> EvalPolicy:
    """Add the opponents of the evaluations that chose the run's best checkpoint, unless the user names some.

    Their strength is constant and they observe the full game; snapshots of the learner are not available.
    """
    rules = subject.env.env.match_rules
    own = subject.run is not None or (rules is not None and rules.outside is not None)
    if rules is None or not own or subject.given & frozenset(rules.settings):
        return subject
    evaluated = subject.env.env.for_evaluation()
    return subject.with_env_settings({name: getattr(evaluated, name) for name in subject.settings})


def viewer_of(subject: EvalPolicy) -> Viewer:
    """Return what draws the environment. Raises UserError if it has nothing."""
    viewer = subject.env.env.viewer()
    if viewer is None:
        raise UserError(
            f"environment '{subject.name}' has no viewer: give its class a method viewer() that returns an "
            "envs_jax.viewing.Viewer"
        )
    return viewer


def draw(viewer: Viewer, shown: Record, suffix: str, frames_per_second: float) -> bytes:
    """Return the content of the file."""
    if suffix == ".html":
        return viewer.html(shown).encode()
    buffer = io.BytesIO()
    if suffix == ".png":
        viewer.picture(shown).save(buffer, "PNG", optimize=True)
        return buffer.getvalue()
    frames = viewer.frames(shown)
    reduced = [frame.convert("P", palette=1, colors=256) for frame in frames]  # 1 = adaptive
    each = round(1000 / frames_per_second)
    times = [each] * (len(frames) - 1) + [each + round(1000 * _REST)]
    reduced[0].save(buffer, "GIF", save_all=True, append_images=reduced[1:], duration=times, loop=0, optimize=True)
    return buffer.getvalue()
