"""The Jidi platform: what can be exported to it, and submission.py, which runs with its weights alone."""
