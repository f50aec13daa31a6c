"""Small models trained at several circuit rates, compared fairly."""
