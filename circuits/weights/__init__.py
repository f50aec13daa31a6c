"""The attention weights of one layer, and the circuits that they form."""
