"""Time and memory of the loss, the training step and sampling, beside references of the same run."""
