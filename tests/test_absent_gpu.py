"""Kernels and training programs, compiled for an NVIDIA H200 that need not be there: XLA, Triton and ptxas take them.

Nothing is run. XLA compiles for a description of the device, `tests/data/h200.txtpb`, whose numbers are those that CUDA
reports of an H200.
"""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, use_abstract_mesh

import envs_jax
from envs_jax import stages
from envs_jax.batch import batched
from envs_jax.coverage import env as coverage_env
from envs_jax.reach import env as reach_env
from jaxrl.cli.flags import parse
from jaxrl.rl.data_parallel import AXIS, REPLICATED, SPLIT
from jaxrl.runtime.build import build_run

pytestmark = [
    pytest.mark.needs("jax_cuda12_plugin"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),  # by jax 0.12
]
DESCRIPTION = Path(__file__).parent / "data" / "h200.txtpb"
KERNELS = {
    "coverage": {"coverage_local_maps", "coverage_team_map", "coverage_readings"},
    "reach": {"reach_control_step"},
}


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Mesh:
    """A mesh of one absent GPU, for which programs are made as if it were JAX's first device."""
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # that a driver is there
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="absent", topology="1x1x1", target_config=DESCRIPTION.read_text()
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for module in (stages, coverage_env, reach_env):
        monkeypatch.setattr(module, "runs_triton", lambda: True)
    return Mesh(np.array(topology.devices), (AXIS,), axis_types=(AxisType.Auto,))


def compile_for(jitted: Any, *shapes: Any) -> str:
    """Compile for the devices in the shardings of `shapes`; return the program's HLO."""
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))):
        text: str = jitted.trace(*shapes).lower().compile().as_text()
    return text


def find_kernels(program: str) -> set[str]:
    return set(re.findall("|".join(sorted(set.union(*KERNELS.values()))), program))


@pytest.mark.parametrize(("name", "settings"), [("coverage", {"q": 57, "num_agents": 4}), ("reach", {})])
def test_steps_have_their_kernels(name: str, settings: dict[str, Any], mesh: Mesh) -> None:
    env = batched(envs_jax.make(name, **settings).for_this_device())

    def place(shapes: Any) -> Any:
        placed = NamedSharding(mesh, SPLIT)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), shapes)

    reset = functools.partial(env.reset, context=())
    state, timestep = jax.eval_shape(reset, jax.random.split(jax.random.key(0), 64))
    choice = jax.eval_shape(env.spec.action.sample, jax.random.key(0))  # of one agent
    action = jax.ShapeDtypeStruct((64, env.spec.num_agents, *choice.shape), choice.dtype)
    step = jax.jit(functools.partial(env.step, context=()))
    assert find_kernels(compile_for(step, *map(place, (state, timestep, action)))) == KERNELS[name]


@pytest.mark.parametrize("flags", ["--algo coma --num_envs 4096", "--algo sac --num_envs 4096", "--algo ddpg"])
def test_blocks_of_training_compile(flags: str, mesh: Mesh) -> None:
    run = build_run(parse(f"{flags} --devices 1 --memory_gb 100".split()).config)
    trainer = dataclasses.replace(run.trainer, mesh=mesh)
    iterations = trainer.place_shapes(jax.ShapeDtypeStruct((), jnp.int32), REPLICATED)
    program = compile_for(trainer.make_block(run.algo.phases[-1]), trainer.shapes(), iterations)
    assert find_kernels(program) == KERNELS.get(run.env.spec.name, set())
