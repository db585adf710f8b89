"""Evaluation: rollouts, policies and matches."""
