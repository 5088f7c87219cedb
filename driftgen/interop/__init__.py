"""Models that come from elsewhere."""
