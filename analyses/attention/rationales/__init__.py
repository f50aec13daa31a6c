"""Rationales: attributions, their faithfulness to the model and their agreement with people's."""
