"""Bodies on their way are counted while they are, and share one limit."""

import pytest

from qualms.web.problems import Problem
from qualms.web.uploads import Uploads


def test_a_body_counts_while_it_is_read_whatever_ends_that() -> None:
    uploads = Uploads()
    with uploads.one(100) as take, uploads.one(100) as other:
        take(30)
        other(50)
        take(20)
        assert (uploads.count, uploads.bytes) == (2, 100)
    assert (uploads.count, uploads.bytes) == (0, 0)
    with pytest.raises(TimeoutError), uploads.one(100) as take:
        take(99)
        raise TimeoutError
    assert (uploads.count, uploads.bytes) == (0, 0)


def test_who_would_exceed_the_limit_of_all_is_refused_and_the_others_go_on() -> None:
    uploads = Uploads()
    with uploads.one(100) as first:
        first(60)
        with pytest.raises(Problem) as refused, uploads.one(100) as second:
            second(40)
            second(1)
        assert uploads.bytes == 60
        first(40)
    assert refused.value.status == 429
    assert refused.value.headers == {"retry-after": "1", "connection": "close"}
