"""What a run tells while it runs: metrics on disk, the console, the state of the device."""
