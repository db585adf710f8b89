"""What `python -m jaxrl.export --format jidi` copies out: submission.py, which stands on its own beside its weights."""
