"""Exported agents as their users load them."""

import types
from pathlib import Path
from typing import Any


def load_agent(folder: Path) -> Any:
    """Return the module agent.py in a folder."""
    path = folder / "agent.py"
    module = types.ModuleType("exported")
    module.__file__ = str(path)
    exec(compile(path.read_text(), module.__file__, "exec"), vars(module))
    return module
