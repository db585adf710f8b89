"""jaxrl: reinforcement learning where environment, replay and learner live on the accelerator."""

__version__ = "0.1.0"
