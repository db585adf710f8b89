"""The agent for the Jidi platform, submission.py, which needs only its weights to run."""
