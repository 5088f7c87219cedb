"""Tools for the repository itself, not installed with the package."""
