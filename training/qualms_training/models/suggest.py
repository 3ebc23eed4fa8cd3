"""The end of an error sentence that guesses which name was meant, for everything that is chosen by name."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'a' or 'b'?` for the known names that resemble `name`, or just a full stop."""
    close = get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
