"""Circuits over training: tracking and the run store."""
