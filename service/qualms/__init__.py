"""Serve a calibrated bundle: the online half of Qualms, with no torch inside."""
