"""Models of other sources: the authors' artifacts and the Hugging Face Hub."""
