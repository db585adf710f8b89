"""Building, compiling, running, storing and resuming runs, on one host or several."""
