"""What test files share: missions and games, recorded or made up, expert datasets, algorithms, runs, programs."""
