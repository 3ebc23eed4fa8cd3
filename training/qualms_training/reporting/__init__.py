"""Evaluate, compare and recalibrate bundles, and write reports and plots."""
