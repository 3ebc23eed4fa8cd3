"""Signed bundles: key files, signing, and opening only what a trusted key signed."""
