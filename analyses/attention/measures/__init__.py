"""Measures of where attention goes: rollout, attention flow, value norms and others."""
