"""Preprocessing: image files and pixel arrays to model input."""
