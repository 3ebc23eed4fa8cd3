"""Training of base and meta-models: the training loop, learning rates and the feature cache."""
