"""What a parsed request consists of, and the maximum of it."""

from dataclasses import dataclass

from qualms.web.problems import Kind, Problem


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum contents of a request."""

    body_bytes: int
    images: int
    json_depth: int
    json_numbers: int = 2**22
    """values in the arrays of a JSON body"""


def too_many_images(limits: Limits) -> Problem:
    """413: the body has more images than the limit."""
    return Problem.refused(Kind.TOO_LARGE, "images", "There are too many images", f"at most {limits.images:,}")
