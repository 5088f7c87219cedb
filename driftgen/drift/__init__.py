"""The drifting field and the drifting loss (section 3 of the paper): functions on tensors, no networks."""
