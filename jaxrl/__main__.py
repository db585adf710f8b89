"""python -m jaxrl: commands, presets, algorithms and environments."""

import sys

import envs_jax
from jaxrl import algos
from jaxrl.cli.presets import presets

COMMANDS = {
    "train": "train, or go on with a run",
    "evaluate": "held-out episodes of a run beside scripted policies",
    "render": "pictures and films of episodes",
    "export": "a policy that leaves: weights and an agent for the Jidi competition",
    "collect": "a labelled set for the collective",
    "doctor": "what this machine can do, and whether a run fits",
}


def main() -> int:
    """Entry point; returns the exit code."""
    for name, text in COMMANDS.items():
        print(f"python -m jaxrl.{name:10} {text}")
    print(f"presets (--config)     {', '.join(presets())}")
    print(f"algorithms (--algo)    {', '.join(algos.ALGORITHMS)}")
    print(f"environments (--env)   {', '.join(envs_jax.registered())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
