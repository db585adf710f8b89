"""python -m bench.peers.worker PEER CORE: measure one peer in its own interpreter, for `python -m bench.peers`.

Requests come as lines of JSON on stdin, each answered by one on stdout: {"open": NAME, "copies": N, "limit": BYTES},
{"sample": NAME, "seconds": X}, {"learn": ALGORITHM, "seed": N, "quick": BOOL}. What
cannot be measured is answered with {"skipped": SENTENCE}. Libraries' own prints go to stderr.
"""

import json
import os
import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from bench.peers.environments import Measured

LIBRARIES = (
    "jax", "jaxlib", "numpy", "gymnax", "jumanji", "jaxmarl", "brax", "rejax", "flax", "optax", "gymnasium",
    "metaworld", "mujoco", "pufferlib", "sbx-rl", "stable_baselines3", "torch",
)  # fmt: skip


def hello(peer: str) -> dict[str, Any]:
    """Return versions, as the record of a result."""
    installed = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    packages: dict[str, Any] = {name: installed[name] for name in LIBRARIES if name in installed}
    return {"peer": peer, "python": platform.python_version(), "packages": packages}


def answer(peer: str, request: dict[str, Any], opened: "dict[str, Measured]") -> dict[str, Any]:
    """Do what a request says. Raises Skipped."""
    from bench.peers.environments import open_environment

    if "open" in request:
        name = request["open"]
        opened[name] = open_environment(peer, name, request["copies"], request["limit"])
        return {"agents": opened[name].agents, **opened[name].facts}
    if "sample" in request:
        return opened[request["sample"]].sample(request["seconds"])
    from bench.peers import learners

    return learners.learn(peer, request["learn"], request["seed"], request["quick"])


def serve(peer: str, requests: TextIO, answers: TextIO) -> None:
    """Answer until the requests end."""
    from bench.peers.environments import Skipped

    opened: dict[str, Measured] = {}
    print(json.dumps(hello(peer)), file=answers, flush=True)
    for line in requests:
        try:
            reply = answer(peer, json.loads(line), opened)
        except Skipped as reason:
            reply = {"skipped": str(reason)}
        except Exception as error:  # raised by the peer: a row says so, the others are measured
            reply = {"skipped": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]}
        print(json.dumps(reply), file=answers, flush=True)


def main() -> None:
    """Pin the process to a core, before libraries count the cores, then serve."""
    peer, core = sys.argv[1:]
    if int(core) >= 0:
        os.sched_setaffinity(0, {int(core)})
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(peer, sys.stdin, answers)


if __name__ == "__main__":
    main()
