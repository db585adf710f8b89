"""Collective and student pre-training: the worker's data, the transformer and the losses."""
