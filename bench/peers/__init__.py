"""Environments and learners of other libraries beside ours, each in a virtual environment of its own."""
