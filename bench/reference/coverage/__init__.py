"""Coverage and COMA."""
