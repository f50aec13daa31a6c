"""Models whose attention can be read, their predictions, and tasks fitted to them."""
