"""The commands of `qkov`."""
