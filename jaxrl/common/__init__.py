"""Errors for users, and atomic file writes."""
