"""Circuits as products of factors: spectra, norms, the preconditioner Omega and the figures of a step."""
