"""Which tensor of a model is W_Q, W_K, W_V or W_O: families, mappings and recognition."""
