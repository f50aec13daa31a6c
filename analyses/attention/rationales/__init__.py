"""Attributions of predictions to tokens, their faithfulness to the model, and their overlap with human rationales."""
