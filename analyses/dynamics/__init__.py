"""The theory of the paper, exactly: equations, first integrals, populations, the single-layer model, training."""
