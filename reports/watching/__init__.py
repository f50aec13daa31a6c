"""The page of a run in training: what its store holds by now, served to a browser on this machine."""
