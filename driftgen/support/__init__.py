"""Small single-purpose helpers, independent of the method."""
