"""The change of each head between two models."""
