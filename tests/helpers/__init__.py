"""What test files share: missions and games, recorded or made up, labelled sets, algorithms, runs, programs."""
