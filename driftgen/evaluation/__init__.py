"""Metrics of generated samples."""
