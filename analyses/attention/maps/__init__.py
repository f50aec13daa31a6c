"""Sources of attention maps: where the maps of a live model come from, one module for each library."""
