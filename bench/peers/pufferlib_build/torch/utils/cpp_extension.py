"""In the place of torch while PufferLib 3.0.0 is built: its snake is compiled, and nothing that needs torch.

Its setup.py imports torch for an extension of its learner, and without its other games (NO_OCEAN) it stops at a name
that it has not defined. The sources, the drawing library among them, come from its source distribution.
"""

import builtins
from typing import Any

import numpy
from setuptools import Extension
from setuptools.command.build_ext import build_ext

CUDA_HOME = None
RAYLIB = "raylib-5.5_linux_amd64"

builtins.c_extension_paths = []  # type: ignore[attr-defined]


class BuildExtension(build_ext):
    """Builds what is left for torch: nothing."""


def CppExtension(*_: Any, **__: Any) -> Extension:
    """Return the snake in the place of the learner's extension, with the flags of setup.py."""
    return Extension(
        "pufferlib.ocean.snake.binding",
        ["pufferlib/ocean/snake/binding.c"],
        include_dirs=[numpy.get_include(), f"{RAYLIB}/include"],
        extra_compile_args=["-DPLATFORM_DESKTOP", "-O2", "-flto"],
        extra_link_args=["-fwrapv", "-O2"],
        extra_objects=[f"{RAYLIB}/lib/libraylib.a"],
    )


CUDAExtension = CppExtension
