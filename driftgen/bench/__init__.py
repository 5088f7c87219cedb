"""Benchmarks of the loss, training steps, pretraining and sampling, beside references of the same run."""
