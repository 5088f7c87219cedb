"""How good samples are, measured."""
