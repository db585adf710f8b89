"""python -m jaxrl: commands, presets, algorithms and environments."""

import sys
from collections.abc import Sequence

import envs_jax
from envs_jax.base import short_repr
from jaxrl import algos
from jaxrl.cli.entry import exit_on_error
from jaxrl.common.errors import UsageError
from jaxrl.runtime.presets import presets

COMMANDS = {
    "train": "train, or go on with a run",
    "evaluate": "held-out episodes of a run beside scripted policies",
    "render": "pictures and films of episodes",
    "export": "a policy that leaves: weights and an agent for the Jidi competition",
    "collect": "an expert dataset for the collective",
    "doctor": "what this machine can do, and whether a run fits",
}


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    if argv:
        raise UsageError(
            f"unexpected word {short_repr(argv[0])}: this command takes none; see python -m jaxrl.train --help"
        )
    for name, text in COMMANDS.items():
        print(f"python -m jaxrl.{name:10} {text}")
    print(f"presets (--config)     {', '.join(presets())}")
    print(f"algorithms (--algo)    {', '.join(algos.ALGORITHMS)}")
    print(f"environments (--env)   {', '.join(envs_jax.registered())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
