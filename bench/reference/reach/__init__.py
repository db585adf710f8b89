"""Reach and SAC."""
