"""SIGTERM under load loses no request: the short form of `drain_campaign`."""

import pytest
from tests.qualms.http1.drain_campaign import Run, runs
from tests.qualms.http1.narrow_link import unavailable

from qualms.bundle.file import Bundle

pytestmark = pytest.mark.slow
KINDS = {
    "keep-alive",
    "connection per request",
    "slow upload",
    "pipelined pair",
    "idle keep-alive",
    "late first request",
}


def problems(finished: list[Run]) -> list[str]:
    return [problem for one in finished for problem in one.problems]


def kinds_with_replies(finished: list[Run]) -> set[str]:
    return {client for one in finished for client, status in one.record.replies if status == 200}


def test_sigterm_under_load_loses_no_request(bundle: Bundle) -> None:
    finished = list(runs(range(3), model=bundle.path))
    assert problems(finished) == []
    assert kinds_with_replies(finished) == KINDS


@pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_sigterm_loses_no_request_if_handshakes_are_under_way(bundle: Bundle, loss: float) -> None:
    finished = list(runs(range(2), narrow=True, loss=loss, model=bundle.path))
    assert problems(finished) == []
    assert kinds_with_replies(finished) == KINDS
    assert any(one.dropped for one in finished) or not loss
