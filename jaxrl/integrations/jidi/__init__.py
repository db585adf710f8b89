"""The Jidi platform: what can be exported to it, and submission.py, which needs only its weights to run."""
