"""Figures, animations and the HTML report."""
