"""Decisions: from scores to OOD flags, p-values and trust, with calibrated thresholds."""
