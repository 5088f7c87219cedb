"""Pages that show the method: the playground."""
