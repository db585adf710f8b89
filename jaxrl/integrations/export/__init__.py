"""Trained policies as files of other formats, which run without jaxrl."""
