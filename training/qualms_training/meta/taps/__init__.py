"""Taps: which outputs inside a base are features, how they are chosen, and how they are read."""
