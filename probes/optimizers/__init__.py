"""Optimizers whose steps are those of heads and circuits."""
