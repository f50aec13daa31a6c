"""Live models: hooks for notebooks and training loops."""
