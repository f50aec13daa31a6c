"""Small models trained on tasks at several circuit learning rates, and compared fairly."""
