"""Reproduction of the paper's tables: many methods on one frozen base, with several seeds, under two protocols."""
