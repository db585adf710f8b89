"""The presets (YAML), installed as the package `jaxrl.configs`."""
