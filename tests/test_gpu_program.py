"""`python -m bench.gpu_program`: what is counted in a program for GPUs, on lists small enough to count by hand."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench import gpu_program
from bench.gpu import thunks
from bench.harness import measure
from jaxrl.common.errors import UserError
from jaxrl.runtime.data_parallel import DataParallel, graphs

# As XLA prints it: a graph of two kernels; a loop of 8 around a graph of 3; a loop of unknown length around a
# convolution, a graph of 2, a branch of 1 or of 2 kernels, and the end of an asynchronous copy.
PROGRAM = """\
000: kCommandBuffer [source       | next=007 (1)]
    001: kCopy         [source | sink] kCopy
    002: kCustomKernel [source | sink] loop_fusion grid: [9, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
003: kWhile         [prev=000 (1) | next=000 (1)]
condition:
    004: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    000: kCommandBuffer [source       | next=334 (1)]
        005: kCopy         [source        | sink         ] kCopy
        006: kGemm         [source        | sink         ] gemm
        018: kAsyncStart   [source        | sink         ] stream=communication_stream[0], async_id=18
            007: kAllReduce    [source        | sink         ] kAllReduce
        019: kAsyncDone    [source        | sink         ] async_id=18
008: kWhile         [prev=000 (1) | next=000 (1)]
condition:
    009: kCustomKernel [source | sink] loop_and_fusion.1 grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    010: kConvolution  [source | sink] conv
    000: kCommandBuffer [source       | next=334 (1)]
        011: kCustomKernel [source | sink] a
        012: kCustomKernel [source | sink] b
    013: kConditional   [prev=000 (1) | next=000 (1)]
      false_branch:
        014: kCustomKernel [source | sink] c
      true_branch:
        015: kCustomKernel [source | sink] d
        016: kCustomKernel [source | sink] e
    017: kCopyDone      [source | sink] copy-done
"""
NAMES = {1: "copy.1", 3: "while.1", 7: "psum.7", 18: "all-reduce-start.2", 8: "while.2", 10: "conv.3"}
HLO = """\
ENTRY %main (x: f32[4]) -> f32[4] {
  %while.1 = (s32[], f32[4]{0}) while(%tuple.1), condition=%c, body=%b, backend_config={"known_trip_count":{"n":"8"}}
  %while.2 = (s32[], f32[4]{0}) while(%tuple.2), condition=%c2, body=%b2
  %all-reduce-start.2 = ((f32[4,256]{1,0}), f32[4,256]{1,0}) all-reduce-start(%a), replica_groups={{0,1}}
  %all-reduce.4 = (f32[4,256]{1,0}, bf16[3]{0}) all-reduce(%a, %b), replica_groups={{0,1}}
}
"""


def program() -> thunks.Thunk:
    return thunks.parse(PROGRAM, NAMES, thunks.trip_counts(HLO))


def test_host_operations_and_what_the_gpu_runs() -> None:
    root = program()
    once = 1 + 1 + (1 + 2)  # the convolution, the graph, the branch and the longer of its sides
    assert root.host_operations() == 1 + 8 * 1 + (1 + 1 + once)  # the unknown loop asks its condition, and reads it
    assert root.nodes() == 2 + 8 * 3 + (1 + 1 + 2 + 2)
    assert [(loop.path, loop.host_operations, loop.nodes) for loop in root.loops()] == [
        ("while.1 x 8", 1, 3), ("while.2 x ?", once, 5)
    ]  # fmt: skip


def test_a_loop_inside_a_graph_costs_the_host_nothing() -> None:
    inside = "000: kCommandBuffer [x]\n" + "\n".join(
        f"    {line}" for line in PROGRAM.splitlines() if "cond" not in line
    )
    root = thunks.parse(inside, NAMES, thunks.trip_counts(HLO))
    assert root.host_operations() == 1
    assert [loop.host_operations for loop in root.loops()] == [0, 0]


def test_a_dump_without_its_list_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no list of thunks"):
        thunks.read(tmp_path, "")
    (tmp_path / "module_0001.f.thunk_metadata.txt").write_text("")
    with pytest.raises(UserError, match=r"holds no .*module_0001\.f\.thunk_sequence\.txt: this version of XLA"):
        thunks.read(tmp_path, "")


def test_repeated_calls_count_as_often_as_they_are_made() -> None:
    leaves = {leaf.name: times for times, leaf in program().leaves() if leaf.name}
    assert leaves == {"copy.1": 1, "all-reduce-start.2": 8, "conv.3": 1}
    assert gpu_program.collective_bytes(HLO) == {
        "all-reduce-start.2": "all-reduce of 4096 bytes",
        "all-reduce.4": f"all-reduce of {4096 + 3 * 2} bytes",
    }


def test_without_a_plugin_for_gpus_one_sentence_says_so() -> None:
    if "cuda" in "".join(entry.name for entry in importlib.metadata.entry_points(group="jax_plugins")):
        pytest.skip("programs can be compiled for GPUs here")
    with pytest.raises(UserError, match=r"install jax\[cuda12\]"):
        gpu_program.absent_mesh(1)


def test_a_result_without_a_name_needs_no_devices() -> None:
    """Asking for the file's default name must not be what finds out about devices."""
    ended = subprocess.run(
        [sys.executable, "-m", "bench.gpu_program", "--programs", "device", "--gpus", "8"],
        cwd=Path(__file__).parents[1], capture_output=True, text=True,
    )  # fmt: skip
    if "cuda" in "".join(entry.name for entry in importlib.metadata.entry_points(group="jax_plugins")):
        assert ended.returncode == 0, ended.stderr  # nothing is compiled: these programs are for one GPU
    else:
        assert ended.returncode == 1
        assert ended.stderr.startswith("error: nothing can be compiled for GPUs here (")


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, sentence in (
        (["--programs", "coma_409"], "--programs: there is no set of programs 'coma_409': did you mean 'coma_4096'"),
        (["--gpus", "9"], "--gpus"),
        (["--gpus", ""], "--gpus names no number: give one, or several separated by commas, such as 1,8"),
    ):
        assert gpu_program.main(flags) == 2
        assert capsys.readouterr().err.startswith(f"error: {sentence}")


def test_results_of_a_former_call_are_kept(tmp_path: Path) -> None:
    file, rows = tmp_path / "programs.json", [{"set": "device", "program": "copy", "gpus": 1}]
    assert gpu_program._earlier(file) == []
    measure.write(gpu_program._result(rows), file)
    assert gpu_program._earlier(file) == rows
    measure.write(gpu_program._result(rows) | {"versions": {"jax": "0.1"}}, file)
    with pytest.raises(UserError, match="other versions"):
        gpu_program._earlier(file)


def test_a_program_that_does_not_compile_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compiled(program: gpu_program.Program) -> tuple[Any, float]:
        if program.name == "bad":
            raise RuntimeError("no such kernel\nat all")
        return None, 1.0

    counts = {"host_operations": 1, "nodes": 2, "loops": [], "library_calls": {}, "collectives": {}}
    counts |= {"temporary_bytes": 0, "peak_bytes": 0}
    programs = [gpu_program.Program(name, None, ()) for name in ("bad", "good")]
    monkeypatch.setattr(gpu_program, "SETS", {"some": lambda gpus: iter(programs)})
    monkeypatch.setattr(gpu_program, "compiled", compiled)
    monkeypatch.setattr(gpu_program, "counted", lambda made, dump: counts)
    for name in ("_without_gpus", "absent_mesh"):
        monkeypatch.setattr(gpu_program, name, lambda _: None)
    file = tmp_path / "programs.json"
    assert gpu_program.main(["--gpus", "1", "--out", str(file)]) == 1
    assert "some, bad, 1 GPU: FAILED: no such kernel at all" in capsys.readouterr().out
    assert [row["program"] for row in measure.read(file)["rows"]] == ["good"]


def test_the_compiler_knows_the_options_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses unknown ones on CPUs too, where these change nothing."""
    assert graphs() == {} == DataParallel(8).compiler_options
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    options, exact = graphs(), DataParallel(8, exact=True).compiler_options
    assert "WHILE" in options["xla_gpu_enable_command_buffer"] and exact["xla_gpu_deterministic_ops"]
    assert options["xla_disable_hlo_passes"] in exact["xla_disable_hlo_passes"]
    compiled = jax.jit(lambda x: x + 1, compiler_options=exact).lower(jnp.ones(3)).compile()
    assert compiled(jnp.ones(3)).tolist() == [2, 2, 2]
    more = DataParallel(8, options=(("xla_disable_hlo_passes", "cse"),)).compiler_options
    assert more["xla_disable_hlo_passes"] == f"cse,{options['xla_disable_hlo_passes']}"
    monkeypatch.setenv("JAXRL_GRAPHS", "off")
    off = graphs()  # not {}, with which XLA's default makes graphs
    assert off == {"xla_gpu_enable_command_buffer": ""} == DataParallel(8).compiler_options
    assert jax.jit(lambda x: x + 1, compiler_options=off)(jnp.ones(3)).tolist() == [2, 2, 2]
    wrong = jax.jit(lambda x: x + 1, compiler_options={"xla_gpu_enable_command_buffer": "SPIRALS"}).lower(jnp.ones(3))
    with pytest.raises(Exception, match="not a valid"):
        wrong.compile()
