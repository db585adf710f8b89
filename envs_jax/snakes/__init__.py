"""Snakes on a torus: two teams of three compete for beans (the "3v3 snakes" game of the Jidi platform)."""
