"""Third-party simulators behind the interface of `envs_jax`; each needs a package of its own (an extra)."""
