"""Attention on the relevant tokens: DTAP, MRTA, AC and ACMC, and the attention of each layer and head."""
