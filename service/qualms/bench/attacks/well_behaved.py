"""The well-behaved client: 50 requests a second at fixed times, half of them on connections of their own.

Latency is counted from the time at which a request was due, so that a service that delays one request cannot hide it by
delaying the next.
"""

import asyncio
from dataclasses import dataclass

import numpy as np
import uvloop

from qualms.bench.load.open_loop import OpenLoopResult, run_open_loop

RATE = 50.0
"""requests/s"""
_DEADLINE = 5.0
"""seconds after which a request without a reply has failed"""


@dataclass(frozen=True)
class ClientResult:
    """What the client observed."""

    sent: int
    failures: int
    """requests without a reply with status 200"""
    p50: float
    """seconds, of the other requests; infinite if there are none"""
    p99: float

    @classmethod
    def of(cls, result: OpenLoopResult) -> "ClientResult":
        """Summarise the requests of a run."""
        due = result.sent + result.skipped_late + result.skipped_no_connection
        p50, p99 = np.percentile(result.good, (50, 99)).tolist() if result.good else (np.inf, np.inf)
        return cls(due, due - len(result.good), p50, p99)


def run_client(url: str, files: list[bytes], seconds: float) -> ClientResult:
    """Send requests to the service at `url` for `seconds`."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(
            run_open_loop(
                f"{url}/predict",
                files,
                RATE,
                seconds,
                _DEADLINE,
                max_lag=np.inf,
                extra_wait=0.0,
                single_use_every=2,
            )
        )
    return ClientResult.of(result)
