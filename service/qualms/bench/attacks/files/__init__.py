"""Hostile image files, by format: they cost a decoder far more than their bytes or pixels suggest."""
