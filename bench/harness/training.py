"""An iteration of training as a compiled program, to measure its seconds."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.algos.base import Algorithm, Phase
from jaxrl.rl.data_parallel import REPLICATED, shardings
from jaxrl.runtime.build import Run


def measured_phase(algo: Algorithm) -> Phase:
    """Return the phase that training spends its time in: the last one that both steps and learns."""
    return [phase for phase in algo.phases if phase.steps and phase.updates][-1]


def iterations(run: Run, block: Any) -> Callable[[], Any]:
    """Return a function that makes a whole iteration, continuing from the last, and returns its results."""
    index = list(run.algo.phases).index(measured_phase(run.algo))
    state = run.trainer.init(jax.random.key(0))
    placed = shardings(run.mesh, REPLICATED)
    held = [dataclasses.replace(state, phase=jax.device_put(jnp.int32(index), placed))]
    one = jax.device_put(jnp.int32(1), placed)

    def iterate() -> Any:
        held[0], metrics = block(held[0], one)
        return held[0], metrics

    return iterate


def compile_block(run: Run) -> Any:
    """Compile the program of the measured phase's iterations."""
    iterations = jax.ShapeDtypeStruct((), jnp.int32, sharding=shardings(run.mesh, REPLICATED))
    block: Any = run.trainer.make_block(measured_phase(run.algo))
    return block.lower(run.trainer.shapes(), iterations).compile()
