"""Training steps: how names, patterns, files and sidecars state them."""
