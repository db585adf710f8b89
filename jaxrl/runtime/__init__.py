"""How a run is built, compiled, stepped, stored and resumed, on one host or several."""
