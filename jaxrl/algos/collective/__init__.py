"""Collective and student pre-training: expert data, the transformer and the losses."""
