"""The checkpoints of a run in the order of their steps, as names, files or the caller tell them."""
