"""AttentionProbe: the attention of every head of a live model, measured while the model runs."""
