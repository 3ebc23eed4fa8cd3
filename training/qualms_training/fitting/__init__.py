"""Fit networks: the training loop, schedules, optimisers and the feature cache."""
