"""Attention on the relevant tokens: DTAP, MRTA and their figures by layer and head."""
