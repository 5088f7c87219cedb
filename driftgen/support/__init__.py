"""Small single-purpose helpers that know nothing of drifting."""
