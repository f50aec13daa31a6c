"""The attention maps of live models, taken from hooks as the model runs."""
