"""Attention measures, such as rollout, attention flow and value norms, and their registry."""
