"""Scoring of many images without a server: `qualms score`."""
