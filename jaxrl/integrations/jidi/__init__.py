"""The files that `python -m jaxrl.export --format jidi` copies: submission.py, which runs with its weights alone."""
