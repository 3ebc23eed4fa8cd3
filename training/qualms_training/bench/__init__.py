"""Benchmarks of training and of the exported graph."""
