"""python bench/harness/startup_child.py FILE ARGUMENTS: `jaxrl.train` that notes when it gets where, and ends.

A process of its own for `bench.startup`: imports nothing before jaxrl does, and works with other versions of it. FILE
gets {mark: [seconds of the monotonic clock, CPU seconds of this process]} as JSON.
"""

import importlib.abc
import importlib.util
import json
import os
import sys
import time
from typing import Any

marks: dict[str, list[float]] = {}


def mark(name: str) -> None:
    """Note the first time that the process gets here."""
    marks.setdefault(name, [time.monotonic(), sum(os.times()[:2])])


def watch_run(module: Any) -> None:
    """Mark when all is imported, the run built, and the programs for its start compiled."""
    start, build, compile_ = module.start, module.build_run, module.compile_run

    def started(*arguments: Any, **others: Any) -> Any:
        mark("imported")
        return start(*arguments, **others)

    def built(*arguments: Any, **others: Any) -> Any:
        found = build(*arguments, **others)
        mark("built")
        return found

    def compiled(*arguments: Any, **others: Any) -> Any:
        found = compile_(*arguments, **others)
        mark("compiled")
        return found

    module.start, module.build_run, module.compile_run = started, built, compiled


def watch_session(module: Any) -> None:
    """Mark the first block's dispatch and its end, and the end of the first one that learns; then end the process."""
    advance, refresh = module.Session._advance, module.Session._refresh

    def advanced(self: Any, state: Any) -> Any:
        found = advance(self, state)
        mark("dispatched")
        return found

    def refreshed(self: Any, position: Any, phase: Any) -> None:
        refresh(self, position, phase)
        mark("first block")
        if position.updates:
            mark("first update")
            with open(sys.argv[1], "w") as file:
                json.dump(marks, file)
            os._exit(0)

    module.Session._advance, module.Session._refresh = advanced, refreshed


class Watch(importlib.abc.MetaPathFinder):
    """Calls the functions above on the modules when they have been imported."""

    watched = {"jaxrl.runtime.run": watch_run, "jaxrl.runtime.session": watch_session}  # noqa: RUF012

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Find a watched module as ever; None for all others."""
        if name not in self.watched:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        assert spec is not None and spec.loader is not None
        execute, watch = spec.loader.exec_module, self.watched[name]

        def executed(module: Any) -> None:
            execute(module)
            watch(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    sys.meta_path.insert(0, Watch())
    from jaxrl.cli.train import main

    sys.exit(main(sys.argv[2:]))
