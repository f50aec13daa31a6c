"""Weights to circuits: the algebra of factored matrices, and checkpoint reading."""
