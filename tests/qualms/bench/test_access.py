import io
import shutil

import pytest
from rich.console import Console

from qualms.bench.access import measure_lookups, run_access


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("wrk") and shutil.which("openssl")), reason="wrk or openssl is not installed")
def test_every_kind_of_access_is_measured_against_none() -> None:
    output = io.StringIO()
    costs, _ = run_access("demo", seconds=1, rounds=1, console=Console(file=output, width=100))
    assert [cost.name for cost in costs] == ["without", "keys", "keys with limits", "TLS", "TLS and keys"]
    assert costs[0].rate_ratio == costs[0].cpu_ratio == 1.0
    assert all(cost.requests_per_second > 0 for cost in costs)
    assert all(cost.name in output.getvalue() for cost in costs)


def test_the_times_of_right_and_wrong_tokens_are_measured() -> None:
    times = measure_lookups(lookups=2000)
    assert min(times.right, times.wrong, times.nearly_right) > 0
