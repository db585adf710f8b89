"""The belief maps, and the backends that update them.

Every agent keeps a local map; one more map fuses the measurements of all. One update, at measurement index k:

    1. every agent enters its own measurement into its local map: cells of its footprint are clipped, then changed;
    2. agent i fuses the messages that it received, senders in increasing order: the WHOLE map is clipped, then the
       cells of the sender's footprint are changed;
    3. the team map fuses all measurements in the same way.

Backends obey the same rules, change cells by the same formula (`belief.Storage.fuse`) and differ only in speed. A
backend is a module with two functions,

    update(config, maps, measurements) -> (Maps, UpdateStats)          for one copy of the environment
    update_batch(config, maps, measurements) -> (Maps, UpdateStats)    for [B] copies

`dense` sweeps whole maps with plain array code and is the reference. `windows` touches footprints only: for CPUs, where
it is several times as fast on large maps (bench/results/map_backends_cpu.json). `pallas` visits the tiles that change,
in three kernels: for GPUs. Backends cannot read each other's maps. `types` is what they share, `fixed_point` how sums
over cells are kept, `tiles` the data of each tile for `pallas`.
"""

import importlib
from types import ModuleType

from envs_jax.stages import on_cpu

WINDOWS_FROM = 14  # resolution q from which windows are faster than whole maps on CPUs
BACKENDS = ("auto", "dense", "windows", "pallas")


def load(name: str) -> ModuleType:
    """Return the module of a backend, imported when it is first needed: CPUs do without JAX's kernel language."""
    return importlib.import_module(f"{__name__}.{name}")


def choose(name: str, cells_per_footprint: int, batched: bool) -> ModuleType:
    """Return the map backend of a name in BACKENDS for maps of resolution q.

    "auto" takes windows for large maps on CPUs, else dense; on GPUs it is replaced before, see
    `Coverage.for_this_device`. Single copies may be vmapped, where windows lose their
    branches: they get dense maps, too.
    """
    if name == "auto":
        name = "windows" if batched and on_cpu() and cells_per_footprint >= WINDOWS_FROM else "dense"
    return load(name)


def tile(name: str, n: int) -> tuple[int, int] | None:
    """Return `MapConfig.tile` of a backend for maps of side n."""
    return load(name).tile(n) if name == "pallas" else None
