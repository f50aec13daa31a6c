"""Whether a series of checkpoints is what it claims to be."""
