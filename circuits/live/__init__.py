"""Attention weights of models in memory."""
