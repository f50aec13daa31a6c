"""AttentionProbe: attention of every head of a live model, measured as the model runs."""
