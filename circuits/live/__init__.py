"""Read the attention weights of models in memory."""
