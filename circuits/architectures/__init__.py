"""Find which tensors of a model are W_Q, W_K, W_V and W_O: families, mappings and recognition."""
