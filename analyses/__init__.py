"""Circuits and data to tables."""
