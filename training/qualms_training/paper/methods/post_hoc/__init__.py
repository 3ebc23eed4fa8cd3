"""Scores computed from a frozen base's logits and features, without training a network."""
