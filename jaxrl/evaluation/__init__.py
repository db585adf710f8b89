"""Episodes without learning: rollouts, policies and matches."""
