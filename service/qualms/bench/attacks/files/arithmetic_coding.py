"""Arithmetic-coded JPEG data of a single block, after which a decoder reads zeros as the same block without end."""

_QE = 0x5A1D
"""probability interval of the less probable decision in the first state; one such decision swaps the two"""
_HALF, _WHOLE = 0x8000, 0x10000
_MORE, _NOT_ZERO, _POSITIVE, _ONE = False, True, False, False
"""decisions for a coefficient of 1: the block has not ended, not zero, sign, magnitude"""


def endless_coefficients(*, dc: bool = False) -> bytes:
    """A block whose 63 alternating-current coefficients are 1; `dc`: it begins with a direct-current difference of 0.

    Each decision of the block is the first one of its kind. Afterwards the decoder takes the decisions of this block for the
    probable ones, and the code of a sequence of probable decisions is all zeros: other blocks need no data.
    """
    decisions = [False] * dc + [_MORE, _NOT_ZERO, _POSITIVE, _ONE] * 63
    return _encode(decisions).replace(b"\xff", b"\xff\0")


def _encode(less_probable: list[bool]) -> bytes:
    """The lower bound of the interval of these decisions, all of them in the first state."""
    low, width, bits = 0, _WHOLE, 16
    for is_less in less_probable:
        lower = width - _QE
        takes_upper = is_less == (lower >= _QE)  # the less probable decision has the smaller part
        low, width = (low + lower, _QE) if takes_upper else (low, lower)
        while width < _HALF:
            low, width, bits = low << 1, width << 1, bits + 1
    padding = -bits % 8
    return (low << padding).to_bytes((bits + padding) // 8)
