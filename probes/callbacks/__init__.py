"""Callbacks that put the instruments of training into the Trainers of transformers and of Lightning."""
