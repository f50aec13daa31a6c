"""The health of attention in training: how fast the largest scores of each head grow, and what holds them."""
