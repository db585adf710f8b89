"""Other people's formats and simulators."""
