"""Scores to verdicts: the OOD flag, the trust decision, operating points and the calibration they rest on."""
