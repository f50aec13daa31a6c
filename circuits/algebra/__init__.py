"""The algebra of circuits, without files and models: products of two factors, their spectra and Omega."""
