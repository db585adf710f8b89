"""Held-out episodes as pages, animations and pictures, with the mean curves of other policies."""

import io
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.base import short_repr
from envs_jax.viewing import Record, Viewer
from jaxrl.common.errors import UsageError, UserError
from jaxrl.common.files import read_bounded
from jaxrl.evaluation.policies import LEARNED, PolicySet, display_name
from jaxrl.runtime.rollouts import extend, held_out_key

_MAX_REPORT_BYTES = 2**28  # bytes of an evaluation file
SUFFIXES = (".html", ".gif", ".png")
_REFERENCES = 3  # scripted policies, besides "random", whose mean curves are shown
_REST = 2.0  # seconds of the last frame of an animation

References = dict[str, dict[str, np.ndarray]]  # see `Record`
FinalMeans = dict[str, dict[str, dict[str, float]]]


def record(
    policy_set: PolicySet,
    name: str,
    episode: int,
    seed: int,
    references: References | None = None,
    final_means: FinalMeans | None = None,
) -> Record:
    """Roll out one held-out episode, equal to episode number `episode` of `jaxrl.evaluate` with this seed.

    `name` is one of `policy_set.policies`; for references and final_means see `Record`.
    """
    rollout = policy_set.evaluator([name], 1, chunk=1).record()  # no choice by memory, which traces the environment
    params = policy_set.parameters(0)
    key = held_out_key(seed, "evaluation")
    states, timesteps, curves, actions = rollout(params, key, policy_set.context, jnp.int32(episode))
    ends = np.flatnonzero(timesteps.terminated | timesteps.truncated)
    steps = int(ends[0]) if len(ends) else len(actions)  # rows after an early end are undefined
    states, timesteps, curves = jax.tree.map(lambda x: x[: steps + 1], (states, timesteps, curves))
    return Record(
        env=policy_set.env.env,
        title=policy_set.description,
        subtitle=f"policy {display_name(name)} · held-out episode {episode}, seed {seed}",
        policy=display_name(name),
        states=states,
        timesteps=timesteps,
        actions=actions[:steps],
        curves=curves,
        references={
            policy: {metric: extend(curve, max(len(curve), steps + 1)) for metric, curve in means.items()}
            for policy, means in (references or {}).items()
        },
        final_means=final_means or {},
    )


def read_evaluation(path: Path, policy_set: PolicySet, name: str) -> tuple[References, FinalMeans]:
    """Read from an evaluation file what a picture of the policy `name` shows of other policies.

    It shows the mean curves of random, of the rendered policy and of the best scripted ones, and the means at the end
    of games.

    Raises UserError: not an evaluation, or one with other settings of the environment.
    """
    try:
        report = json.loads(read_bounded(path, _MAX_REPORT_BYTES))
        # every opponent has matches of its own
        free_settings = {*report["set"], "opponent"} if "matches" in report else set()
        evaluated_settings = report["env_settings"]
        settings = json.loads(json.dumps(policy_set.settings))
        names = {*evaluated_settings, *settings}
        different = {name for name in names if evaluated_settings.get(name) != settings.get(name)}
        if report["env"] != policy_set.name or not different <= free_settings:
            raise UserError(
                f"{path} was made with other settings of the environment: run jaxrl.evaluate with these settings first"
            )
        return _references(report, policy_set, name), _final_means(report)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {short_repr(str(error))}"
        raise UserError(f"{path} is not an evaluation that jaxrl.evaluate wrote ({reason})") from None


def _references(report: Any, policy_set: PolicySet, name: str) -> References:
    """Return float64[T + 1, 2] per policy and metric, of the policies that are worth a curve."""
    curves: References = {}
    policies = dict(report["policies"].items())
    for policy in (policy for policy in policy_set.policies if policy in policies):
        metrics = policies[policy].items()
        curves[policy] = {key: np.array([values["mean"], values["ci95"]], np.float64).T for key, values in metrics}
        if any(curve.shape != (report["steps"] + 1, 2) for curve in curves[policy].values()):
            raise ValueError("a curve has another length than the episode")
    sign = {"min": 1, "max": -1}[report["score_mode"]]
    finals = {policy: sign * values[report["score"]][-1, 0] for policy, values in curves.items()}
    scripted = [policy for policy in curves if policy not in (*LEARNED, "random") and np.isfinite(finals[policy])]
    best = sorted(scripted, key=lambda policy: finals[policy])[:_REFERENCES]
    chosen = dict.fromkeys(["random", *(["learned"] if policy_set.run else []), *best, name])
    return {display_name(policy): curves[policy] for policy in chosen if policy in curves}


def _final_means(report: Any) -> FinalMeans:
    final_means: FinalMeans = {}
    for match in report.get("matches", ()):
        means = {metric: float(values["mean"]) for metric, values in match.items() if isinstance(values, dict)}
        if not np.all(np.isfinite(list(means.values()))):
            raise ValueError("a mean is not finite")
        final_means.setdefault(display_name(str(match["second"])), {})[display_name(str(match["first"]))] = means
    return final_means


def require_viewer(policy_set: PolicySet) -> Viewer:
    """Return what draws the environment. Raises UsageError if it has nothing."""
    viewer = policy_set.env.env.viewer()
    if viewer is None:
        advice = "give its class a method viewer() that returns an envs_jax.viewing.Viewer"
        if policy_set.env.on_host:
            advice = "draw it with its own library"
        raise UsageError(f"environment '{policy_set.name}' has no viewer: {advice}")
    return viewer


def draw(viewer: Viewer, episode: Record, suffix: str) -> bytes:
    """Draw an episode; return the content of a file with this suffix, one of SUFFIXES."""
    if suffix == ".html":
        return viewer.html(episode).encode()
    buffer = io.BytesIO()
    if suffix == ".png":
        viewer.picture(episode).save(buffer, "PNG")
        return buffer.getvalue()
    frames = viewer.frames(episode)
    reduced = [frame.convert("P", palette=1, colors=256) for frame in frames]  # 1 = adaptive
    each = round(1000 / viewer.rate)
    times = [each] * (len(frames) - 1) + [each + round(1000 * _REST)]
    reduced[0].save(buffer, "GIF", save_all=True, append_images=reduced[1:], duration=times, loop=0, optimize=True)
    return buffer.getvalue()
