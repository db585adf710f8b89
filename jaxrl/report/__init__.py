"""Reports of a run: metrics on disk, the console, the state of the device."""
