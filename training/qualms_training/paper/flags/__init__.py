"""`qualms compare-flags`: the flag score against its predecessor and every single score, with a paired bootstrap."""
