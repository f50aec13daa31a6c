"""Subject-verb agreement: generated sentences, published minimal pairs and parsed corpora."""
