"""What test files share: recorded positions of the environments as their own types, and compiled programs."""
