"""Errors for people, and files that are never half written."""
