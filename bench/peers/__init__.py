"""Environments and learners of other libraries, compared with ours, each in a virtual environment of its own."""
