"""Models whose attention can be observed, and what they predict."""
