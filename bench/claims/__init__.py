"""Claims of README.md and docs/results.md as commands that anyone can run: claims.yaml lists them, see `__main__`."""
