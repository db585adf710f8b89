"""python -m jaxrl COMMAND ...: the same as python -m jaxrl.COMMAND; alone, it lists commands, presets and names."""

import importlib
from collections.abc import Callable, Sequence

import envs_jax
from envs_jax.settings import closest, short_repr
from jaxrl import algos
from jaxrl.cli.entry import exit_on_error
from jaxrl.common.errors import UsageError
from jaxrl.runtime.presets import presets

COMMANDS = {
    "train": "train, or resume a run",
    "evaluate": "evaluate a run and scripted policies on held-out episodes",
    "render": "render episodes as pages, animations or pictures",
    "export": "export a policy: weights, a function for JAX or ONNX, a file for NumPy, a Jidi agent",
    "collect": "collect an expert dataset for the collective",
    "runs": "list runs, compare their settings, draw their curves",
    "doctor": "check this machine, and the memory that a run needs",
}


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command that `argv` begins with, or list all of them; return the exit code."""
    if argv and argv[0] in COMMANDS:
        command: Callable[..., int] = importlib.import_module(f"jaxrl.cli.{argv[0]}").main
        return command.__wrapped__(argv[1:])  # type: ignore[attr-defined]  # whose errors `exit_on_error` shows here
    if words := [word for word in argv if word not in ("-h", "--help")]:
        raise UsageError(f"unexpected word {short_repr(words[0])}: {closest(words[0], COMMANDS)}")
    print("each command describes its flags with --help:")
    for name, text in COMMANDS.items():
        print(f"python -m jaxrl {name:10} {text}")
    print(f"presets (--config)     {', '.join(presets())}")
    print(f"algorithms (--algo)    {', '.join(algos.ALGORITHMS)}")
    print(f"environments (--env)   {', '.join(envs_jax.registered())}")
    return 0
