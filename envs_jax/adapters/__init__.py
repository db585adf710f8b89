"""Third-party simulators with the interface of `envs_jax`; each needs its own package (an extra)."""
