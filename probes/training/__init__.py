"""CircuitProbe: circuits of a model in training, measured step by step."""
