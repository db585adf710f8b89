"""Tables of a benchmark's result, printed and written next to it as .md."""

from pathlib import Path
from typing import Any

from jaxrl.common.errors import UserError
from jaxrl.common.files import write_atomically
from jaxrl.report.console import format_duration, format_si, gibibytes

Table = tuple[str, list[str], list[list[str]]]  # title, headings, rows


# Tables


def tables(result: dict[str, Any]) -> list[Table]:
    """Return all tables of a result."""
    make = {"env_throughput": _env_tables, "train_throughput": _train_tables, "compare": _compare_tables}
    if result["kind"] not in make:
        raise UserError(f"results of kind '{result['kind']}' have no table")
    return make[result["kind"]](result)


def _env_tables(result: dict[str, Any]) -> list[Table]:
    """Environments: rates of the three stages, times the baseline, and what bounds them."""
    baseline = result["baseline"]
    varied = any(row["variant"] for row in result["rows"])
    head = ["num_envs", "at once", "rules", "observation", "policy", "reset/s"]
    head += ["roofline", "compile", "bytes/env", "temporary/env"]
    rows = []
    for row in result["rows"]:
        stages = row["stages"]
        line = [f"{row['num_envs']:,}", f"{row['together']:,}"]
        line += [_rate(stages[name]) + _times(stages[name].get("times_baseline")) for name in stages]
        line += [format_si(row["reset"]["rate"]), _percent(stages["observation"].get("roofline"))]
        line += [f"{row['compile_seconds']:.1f} s", gibibytes_small(row["state_bytes_per_env"])]
        line += [gibibytes_small(stages["observation"]["temporary_bytes_per_env"])]
        rows.append([row["variant"], *line] if varied else line)
    if baseline:
        line = [_baseline(result), "1", *(_rate(baseline[name]) for name in ("rules", "observation", "policy"))]
        line += [format_si(baseline["reset"]["rate"]), "", "", "", ""]
        rows.append(["", *line] if varied else line)
    title = f"{result['env']}: env steps/s by stage" + (f" (times {_baseline(result)})" if baseline else "")
    return [(title, ["variant", *head] if varied else head, rows)]


def _train_tables(result: dict[str, Any]) -> list[Table]:
    """Training: rates of whole iterations, and of the learner against the machine."""
    head = ["num_envs", "iteration", "env steps/s", "updates/s", "collect steps/s", "learner FLOP/s", "of matmul"]
    head += ["of conv", "compile", "memory"]
    torch = any(row["torch"] for row in result["rows"])
    rows = []
    for row in result["rows"]:
        about = "~" if row["projected"] else ""
        line = [f"{row['num_envs']:,}", about + duration_small(row["iteration_seconds"])]
        line += [about + format_si(row["env_steps_per_second"]), about + format_si(row["updates_per_second"])]
        line += [
            format_si(row["collect"]["rate"]),
            format_si(row["learn"]["rate"]),
            _percent(row["learn"]["of_matmul"]),
        ]
        line += [_percent(row["learn"]["of_convolution"]), f"{row['compile_seconds']:.1f} s"]
        line += [gibibytes(row["bytes_per_device"])]
        if torch:
            theirs = row["torch"]
            line += [f"~{format_si(theirs['env_steps_per_second'])}{_times(theirs['times'])}" if theirs else ""]
            line += [format_si(theirs["learn"]["rate"]) if theirs else ""]
        rows.append(line)
    if torch:
        head += ["torch steps/s (times)", "torch FLOP/s"]
    return [(f"{result['algo']} on {result['env']}: training (~ projected from parts)", head, rows)]


def _compare_tables(result: dict[str, Any]) -> list[Table]:
    return [
        (f"{name}, {title}", head, rows)
        for name, case in result["cases"].items()
        for part in case.values()
        for title, head, rows in tables(part)
    ]


def _baseline(result: dict[str, Any]) -> str:
    """Return the name of the baseline; older results lack it."""
    return result.get("baseline_name") or "NumPy"


def _rate(entry: dict[str, Any]) -> str:
    return format_si(entry["rate"])


def _times(factor: float | None) -> str:
    return "" if factor is None else f" ({factor:.3g}x)"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def gibibytes_small(bytes_used: float) -> str:
    """Format bytes, also few of them."""
    return f"{bytes_used / 1024:.1f} KiB" if bytes_used < 2**20 else f"{bytes_used / 2**20:.1f} MiB"


def duration_small(seconds: float) -> str:
    """Format seconds, also fractions of one."""
    return format_duration(seconds) if seconds >= 10 else f"{seconds:.3g} s"


# Output


def heading(result: dict[str, Any]) -> list[str]:
    """Return the source of the figures."""
    record = result["machine"]
    rates = result.get("rates")
    lines = [
        f"`{result['command']}`",
        f"{record['devices']} ({record['backend_name']}), {record['processor']}, {record['cores']} cores, "
        f"jax {record['jax']}, Python {record['python']}, {record['started']}, load {record['load']:.1f}",
    ]
    if rates:
        products = ", ".join(f"{name} {format_si(value)}FLOP/s" for name, value in rates["matmul"].items())
        convolutions = ", ".join(f"{name} {format_si(value)}FLOP/s" for name, value in rates["convolution"].items())
        lines.append(
            f"measured here: memory {format_si(rates['copy'])}B/s (fresh pages {format_si(rates['fresh'])}B/s), matrix "
            f"products {products}, convolution of width {rates['width']} {convolutions}"
        )
    return lines


def markdown(result: dict[str, Any]) -> str:
    """Return the result as a Markdown page."""
    parts = ["\n".join(f"{line}  " for line in heading(result))]
    for title, head, rows in tables(result):
        lines = [f"**{title}**", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        parts.append("\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]))
    if result["notes"]:
        parts.append("\n".join(f"- {note}" for note in result["notes"]))
    return "\n\n".join(parts) + "\n"


def show(result: dict[str, Any], path: Path) -> None:
    """Print the tables, and write them as .md next to the JSON file `path`. Raises UserError."""
    page = markdown(result)
    print(page)
    try:
        write_atomically(path.with_suffix(".md"), page)
    except OSError as error:
        raise UserError(f"cannot write next to {path} ({error.strerror}): choose another file with --out") from None
    print(f"wrote {path} and {path.with_suffix('.md').name}")
