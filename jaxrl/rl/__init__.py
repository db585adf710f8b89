"""Returns, replay and self-play."""
