import io

import pytest
from rich.console import Console

from qualms.bench.client_rates import run_client_rates
from qualms.bench.load.closed_loop import BuiltInClient


@pytest.mark.slow
def test_every_way_to_send_is_measured_and_printed_as_a_share_of_the_load_generator() -> None:
    output = io.StringIO()
    rows = run_client_rates(
        "demo", seconds=0.1, rounds=1, generator=BuiltInClient(), console=Console(file=output, width=100)
    )
    names = [row.name for row in rows]
    assert names.count(BuiltInClient.name) == 2
    assert {"Client in a loop", "AsyncClient, 32 tasks", "Client, lists of 640"} <= set(names)
    assert all(row.images_per_second > 0 and row.of_wrk > 0 for row in rows)
    for name in names:
        assert name in output.getvalue()
