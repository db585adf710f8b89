"""Multi-UAV terrain mapping: agents fly over a binary terrain and fuse noisy camera readings into a shared belief.

Rules after J. Westheider, J. Rueckin and M. Popovic, "Multi-UAV Adaptive Path Planning Using Deep Reinforcement
Learning", IROS 2023, arXiv 2303.01150, and the public repository dmar-bonn/ipp-marl.

Modules: `world` geometry, `terrain` ground truth, `raster` grounds from files, `sensor` camera and its noise, `actions`
moves and masks, `communication` messages, `belief` log-odds, `maps` the backends that update and read the maps,
`observation` inputs of actor and critic, `reward` (and metrics), `types` state and settings, `env` the mission that
combines them, `baselines` scripted policies. One copy per function; layout letters: A agents, n map side in cells.
"""

from envs_jax.coverage.env import Coverage

__all__ = ["Coverage"]
