"""The packages of the wheel. Everything else stands in pyproject.toml.

The presets live in the top-level folder `configs/`, where a user looks for them, and are installed as the
package `jaxrl.configs`. Setuptools takes a package whose folder has another name only together with a
list of all packages, and only Python can make that list by looking.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["envs_jax", "envs_jax.*", "jaxrl", "jaxrl.*"]),
        "jaxrl.configs",
    ],
    package_dir={"jaxrl.configs": "configs"},
    package_data={
        "jaxrl.configs": ["*.yaml"],
        "jaxrl": ["py.typed", "pretrained/**/*"],
        "envs_jax": ["py.typed"],
        "envs_jax.reach": ["*.json"],
        "envs_jax.viewing": ["*.html"],
    },
)
