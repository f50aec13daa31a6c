"""Watching a live model's attention maps: its forward, the tokens of each call, and the heads that are selected."""
