"""The fastest variant of an environment on this device, among those that agree: see `Environment.variants`.

At the start of a run the variants are compiled for a small batch, compared with the first one, and timed in turns. That
happens in a separate process, so that a kernel that crashes or hangs does no harm. Results are
cached for this kind of device, these versions, and these settings.

    python -m jaxrl.runtime.variants COPIES < settings.json     is that process; it prints what `search` returns
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.base import Array, Environment
from envs_jax.batch import BatchedEnvironment, batched
from envs_jax.progress import start
from jaxrl.common.errors import one_line
from jaxrl.evaluation.rollouts import scripted
from jaxrl.report.cache import Warn, cache_folder, enable_compilation_cache, read_measured, write_measured
from jaxrl.runtime import config as configuration
from jaxrl.runtime import memory_plan
from jaxrl.runtime.config import Config
from jaxrl.runtime.data_parallel import graphs
from jaxrl.runtime.run_directory import versions

TOLERANCE = 2e-5  # of real numbers; exp and log differ by a few units in the last place between kernels
COPIES, BYTES = 256, 2**28  # most environments, and bytes of their states, that are stepped together
STEPS = 15  # steps of one episode that are compared and timed
ROUNDS = 5
LEAST = 0.05  # seconds of a sample
LIMIT = 150.0  # seconds, after which the search is given up
RETRY = 3600.0  # seconds, after which a variant that failed is tried again
FILE = "variants.json"  # beside compiled programs
_VERSIONS = ("jax", "jaxlib", "jaxrl", "backend")

Found = dict[str, Any]
Change = Mapping[str, Any]


# Comparing


def rollout(env: BatchedEnvironment, keys: Array, number: Array | int) -> Any:
    """Return (state, time step) of environments [B] after `number` random steps; keys key[B]."""
    return jax.jit(_rollout, static_argnums=0, compiler_options=graphs())(env, keys, number)


def _rollout(env: BatchedEnvironment, keys: Array, number: Array | int) -> Any:
    context, policy = env.context(start()), scripted(env, "random")

    def step(t: Array, carry: Any) -> Any:
        state, timestep = carry
        keys_action = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, t)
        action, _ = policy((), (), state, timestep, keys_action)
        return env.step_without_reset(state, action, context)

    state, timestep = jax.lax.fori_loop(jnp.int32(0), jnp.int32(number), step, env.reset(keys, context))
    return state.env, timestep


@functools.partial(jax.jit, static_argnums=0)
def _differences(envs: tuple[Environment, Environment], *found: Any) -> tuple[Array, Array]:
    """Return the number of integers that differ, and the largest difference of real numbers (relative above 1)."""
    exact, real = jnp.int32(0), jnp.float32(0)
    pair = [(env.comparable_state(state), timestep) for env, (state, timestep) in zip(envs, found, strict=True)]
    for a, b in zip(*map(jax.tree.leaves, pair), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if jnp.issubdtype(a.dtype, jnp.floating):
            size = jnp.maximum(jnp.maximum(jnp.abs(a), jnp.abs(b)), jnp.ones((), a.dtype))
            apart = jnp.where(a == b, jnp.zeros((), a.dtype), jnp.abs(a - b) / size).astype(jnp.float32)
            real = jnp.maximum(real, jnp.max(jnp.where(jnp.isfinite(apart), apart, jnp.inf)))
        else:
            exact += jnp.sum(a != b, dtype=jnp.int32)
    return exact, real


def compare(envs: tuple[Environment, Environment], copies: int, steps: int) -> tuple[int, float]:
    """Step two variants with the same random actions, and compare them after every step.

    Returns:
        number of integers that differ, and the largest difference of real numbers (relative for numbers above 1).
    """
    keys = jax.random.split(jax.random.key(0), copies)
    found = [_differences(envs, *(rollout(batched(env), keys, t) for env in envs)) for t in range(steps + 1)]
    exact, real = zip(*jax.device_get(found), strict=True)
    return int(sum(map(int, exact))), float(max(real))


def benchmark_variants(
    env: Environment, changes: Sequence[Change], copies: int, steps: int = STEPS, rounds: int = ROUNDS
) -> Found:
    """Compare and time variants of an environment on this device, over `rounds` samples of everything in turns.

    Args:
        env: with the settings that `changes` change.
        changes: of settings, the reference first.
        copies, steps: environments stepped together, and steps of an episode, at most its length.

    Returns:
        {"settings": the fastest change that agrees, "steps", "copies", "seconds": {name: samples},
        "differences": {name: those of `compare`}, "failures": {name: sentence}}; names as of `named`.
    """
    settings: Any = env
    variants: dict[str, Environment] = {named(change): dataclasses.replace(settings, **change) for change in changes}
    steps = min(steps, env.spec.horizon)
    reference, *others = variants
    differences: dict[str, tuple[int, float]] = {}
    failures: dict[str, str] = {}
    for name in others:
        try:
            differences[name] = compare((variants[reference], variants[name]), copies, steps)
        except Exception as error:  # a compiler or a device can raise anything
            failures[name] = one_line(f"{type(error).__name__}: {error}")
    keys = jax.random.split(jax.random.key(0), copies)
    agreeing = [reference, *(name for name, pair in differences.items() if agrees(pair))]
    seconds: dict[str, list[float]] = {name: [] for name in agreeing}
    for sample, name in itertools.product(range(-1, rounds), agreeing):  # the first warms up
        began, calls = time.perf_counter(), 0
        while not calls or time.perf_counter() - began < LEAST:
            jax.block_until_ready(rollout(batched(variants[name]), keys, steps))
            calls += 1
        if sample >= 0:
            seconds[name].append((time.perf_counter() - began) / calls)
    fastest = min(seconds, key=lambda name: statistics.median(seconds[name]))
    return {
        "settings": dict(next(change for change in changes if named(change) == fastest)),
        "steps": steps,
        "copies": copies,
        "seconds": seconds,
        "differences": {name: list(pair) for name, pair in differences.items()},
        "failures": failures,
    }


def agrees(differences: Sequence[float]) -> bool:
    """Return whether variants with these differences (of `compare`) are equal up to rounding."""
    exact, real = differences
    return exact == 0 and real <= TOLERANCE


def named(change: Change) -> str:
    """Describe a change of settings, such as "map_backend dense"."""
    return ", ".join(f"{name} {value}" for name, value in change.items())


# Choosing


def choose(config: Config, num_envs: int, say: Warn, file: Path | None = None) -> Found:
    """Return the result of `benchmark_variants` for the environment of a configuration, perhaps of an earlier run.

    `num_envs` are those of a device, `say` receives the decision and warnings, and `file` (by default `FILE` beside the
    compiled programs) holds earlier decisions.
    """
    env, file = config.make_env(), file or cache_folder() / FILE
    copies = max(1, min(num_envs, COPIES, BYTES // memory_plan.rollout_env_bytes(batched(env))))
    known, changes = versions(), [dict(change) for change in env.variants()]
    facts = {"device": jax.local_devices()[0].device_kind, **{name: known[name] for name in _VERSIONS}}
    facts |= {"environment": repr(env), "rules": env.version, "copies": copies}
    key = json.dumps(facts, sort_keys=True)
    found: Any = read_measured(file, say).get(key)
    with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):  # a damaged entry
        if found["settings"] in changes and time.time() < found.get("until", math.inf):
            say(f"{_sentence(found)} (found by an earlier run)")
            return dict(found)
    found = search(config, copies, changes[0])
    for name, failure in found["failures"].items():
        say(f"warning: {name} is skipped, it failed: {failure}")
    for name, pair in found["differences"].items():
        if not agrees(pair):
            say(f"warning: {name} is skipped, its results are wrong on this device: {_apart(pair)}")
    say(_sentence(found))
    until = {"until": time.time() + RETRY} if found["failures"] else {}
    write_measured(file, {key: found | until}, say)
    return found


def search(config: Config, copies: int, reference: Change) -> Found:
    """Run `benchmark_variants` in a separate process; return the reference and the failure if that process crashes."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "jaxrl.runtime.variants", str(copies)],
            input=json.dumps(config.plain()),
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            | {"JAX_COMPILATION_CACHE_DIR": str(cache_folder())},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        failure = f"it took longer than {LIMIT:.0f} s"
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        failure = one_line(f"its process ended with exit code {done.returncode} ({last})")
    nothing: Found = {"copies": copies, "steps": STEPS, "seconds": {}, "differences": {}}
    return {"settings": dict(reference), "failures": {"the comparison": failure}, **nothing}


def _sentence(found: Found) -> str:
    chosen = named(found["settings"])
    times = {name: statistics.median(samples) for name, samples in found["seconds"].items()}
    if chosen not in times:
        return f"{chosen} is taken, nothing could be compared"
    others = [f"{name} {1e3 * seconds:.3g} ms" for name, seconds in times.items() if name != chosen]
    took = f"{found['steps']} steps of {found['copies']} copies take {1e3 * times[chosen]:.3g} ms"
    compared = [f"{name}: {_apart(pair)}" for name, pair in found["differences"].items()]
    return "; ".join([f"{chosen} is taken: {took}", *others, *compared])


def _apart(pair: Sequence[float]) -> str:
    return f"{pair[0]} integers differ, real numbers by {pair[1]:.1e} at most"


def main(argv: Sequence[str]) -> None:
    """Print the result of `benchmark_variants` for the settings on stdin."""
    enable_compilation_cache()
    config = configuration.build(json.load(sys.stdin), "stdin")
    env = config.make_env()
    print(json.dumps(benchmark_variants(env, env.variants(), int(argv[0]))))


if __name__ == "__main__":
    main(sys.argv[1:])
