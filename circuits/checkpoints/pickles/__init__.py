"""Pickles read without running code: tensors, arrays and plain containers are built, everything else is named."""
