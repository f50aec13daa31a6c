"""Open checkpoints and read their attention weights layer by layer."""
