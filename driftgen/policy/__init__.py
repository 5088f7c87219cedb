"""Policies: demonstrations, environments, the one-step policy and its rollouts."""
