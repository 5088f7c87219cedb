"""Configurations, recipes, training steps and the loop that runs them."""
