"""Replay, targets and losses, statistics, and data parallelism."""
