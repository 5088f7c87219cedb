"""Sampling as a service: one process answers HTTP requests, another one holds the model."""
