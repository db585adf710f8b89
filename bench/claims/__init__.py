"""What README.md and docs/results.md claim, as commands that anyone can run: claims.yaml lists it, see `__main__`."""
