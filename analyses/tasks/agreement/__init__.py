"""The subject-verb agreement task: generated sentences, published minimal pairs and parsed corpora."""
