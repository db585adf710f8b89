"""Snakes and DDPG."""
