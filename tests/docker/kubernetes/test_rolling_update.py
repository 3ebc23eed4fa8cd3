"""A short version of `rolling_update_campaign`: real replicas behind a real haproxy."""

from pathlib import Path

import pytest
from tests.docker.kubernetes.rolling_update_campaign import kill, roll
from tests.docker.stack import missing_programs

MISSING = missing_programs("haproxy")

pytestmark = [pytest.mark.container, pytest.mark.skipif(bool(MISSING), reason=MISSING)]


def test_a_rolling_update_loses_no_request(tmp_path: Path) -> None:
    rollout = roll(tmp_path, requests=3000, rate=100, pre_stop=2.0, drain_seconds=3)
    assert rollout.replaced.total() >= 1
    assert rollout.bad_exits == []
    assert (rollout.failed, rollout.load.skipped_late + rollout.load.skipped_no_connection) == (0, 0)


def test_a_killed_replica_loses_at_most_its_requests_in_flight(tmp_path: Path) -> None:
    rollout = kill(tmp_path, kills=1, rate=100)
    assert rollout.failed <= sum(rollout.killed)
    assert rollout.other_response_errors == 0
