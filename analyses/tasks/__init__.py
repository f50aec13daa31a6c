"""Examples with relevant tokens: where they come from, and how they reach a model."""
