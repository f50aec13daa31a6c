"""Where attention goes, and whether it is faithful to what the model does."""
