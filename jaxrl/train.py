"""python -m jaxrl.train --algo coma --num_envs 4096: train, or continue a run with --resume."""

import sys
from collections.abc import Sequence

from jaxrl import config, session
from jaxrl.report.cache import enable_compilation_cache


@config.exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    request = config.parse(argv, description=__doc__)
    enable_compilation_cache()
    if request.resume is not None:
        ended = session.resume(request.resume, request.config, request.changes)
    else:
        ended = session.start(request.config)
    print(f"{ended.sentence}\n{ended.memory}\nrun directory: {ended.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
