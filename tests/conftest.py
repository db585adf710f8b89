"""JAX for all tests: a quick compiler, eight CPU devices, no silent promotion of types, compiled programs kept."""

import collections
import gc
import importlib.metadata
import importlib.util
import os
import signal
from pathlib import Path

# Tests wait for the compiler, not for what it makes: three to four times less time for most programs. A nightly
# run sets JAXRL_TEST_XLA_FLAGS to nothing, for the programs that users get.
QUICK_COMPILER = "--xla_backend_optimization_level=0"
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones end the process over this flag
    # all cores are busy with other tests: parts of a program that are compiled side by side only cost more in sum
    QUICK_COMPILER += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
_FORMER = os.environ.get("XLA_FLAGS")
os.environ["XLA_FLAGS"] = f"{_FORMER or ''} {os.environ.get('JAXRL_TEST_XLA_FLAGS', QUICK_COMPILER)}".strip()

import jax  # noqa: E402
import pytest  # noqa: E402

_CACHE = Path(__file__).parents[1] / ".cache" / "jax"
if "PYTEST_XDIST_WORKER" not in os.environ and sum(path.stat().st_size for path in _CACHE.glob("*")) > 2**31:
    for path in _CACHE.glob("*"):  # it grows with every change of a program
        path.unlink(missing_ok=True)

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it, and so would runs

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_in_locations_limit", 0)  # nobody reads where an operation of a test comes from
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.03)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# XLA has read its flags when the first client exists; processes that tests start get the user's compiler again.
jax.devices()
if _FORMER is None:
    del os.environ["XLA_FLAGS"]
else:
    os.environ["XLA_FLAGS"] = _FORMER


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", help="I/N: run part I of N of the tests, whole files")


@pytest.hookimpl(trylast=True)  # after marks have left out what does not run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the files of this shard: the largest file goes first, each to the shard that has the fewest tests."""
    shard, shards = map(int, config.getoption("shard").split("/"))
    sizes = collections.Counter(item.path for item in items)
    totals = dict.fromkeys(range(1, shards + 1), 0)
    shard_by_file = {}
    for path, size in sorted(sizes.items(), key=lambda pair: (-pair[1], pair[0])):
        shard_by_file[path] = min(totals, key=totals.__getitem__)
        totals[shard_by_file[path]] += size
    config.hook.pytest_deselected(items=[item for item in items if shard_by_file[item.path] != shard])
    items[:] = [item for item in items if shard_by_file[item.path] == shard]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs packages which are not installed."""
    needed = [package for mark in item.iter_markers("needs") for package in mark.args]
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"needs the packages {', '.join(missing)}: make test-extras installs them")


def pytest_collection_finish() -> None:
    """Tracing makes many objects: collecting garbage as often as Python does takes a twentieth of the tests' time."""
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)
