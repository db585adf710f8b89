"""Third-party formats and simulators."""
