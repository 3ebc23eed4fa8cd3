"""Hostile requests (400, or FUZZ_CASES): the reply is never a 5xx, and every error is a problem.

Half of the cases are generated from the OpenAPI document (schemathesis), half are damaged or hostile image files and bodies.
Both are the same in every run.
"""

import gc
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance
from tests.qualms.fuzz.body_cases import MAKERS, MAX_BODY_BYTES, MAX_PIXELS

from qualms.replies import PredictReply, ProblemReply
from qualms.web.problems import MEDIA_TYPE

CASES = int(os.environ.get("FUZZ_CASES", "400"))
GROWTH = 32 * 2**20
"""maximal growth of memory in bytes after a warm-up, for any number of cases: allocators keep some freed memory"""


@pytest.fixture
def client(start_service: Callable[..., httpx.Client]) -> httpx.Client:
    return start_service(max_pixels=MAX_PIXELS, max_body_bytes=MAX_BODY_BYTES)


def check(response: httpx.Response) -> None:
    """A reply is a complete prediction or a problem with a status below 500; a short deadline may also be missed (504)."""
    expired = response.status_code == 504 and "x-request-timeout" in response.request.headers
    assert response.status_code < 500 or expired, response.text
    if response.status_code == 200:
        PredictReply.model_validate_json(response.content)
    else:
        assert response.headers["content-type"] == MEDIA_TYPE, response.text
        problem = ProblemReply.model_validate_json(response.content)
        assert problem.status == response.status_code
        assert problem.request_id == response.headers["x-request-id"]


# From the OpenAPI document


OPERATIONS = [("/predict", "POST", mode, 0.49) for mode in GenerationMode]
OPERATIONS += [
    (path, "GET", GenerationMode.POSITIVE, 0.02)
    for path in ("/models", "/models/{name}", "/metrics", "/livez", "/readyz")
]
"""path, method, valid or invalid data, share of the cases; only /predict has parameters that can be invalid"""


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method", "mode", "share"), OPERATIONS)
def test_replies_to_generated_requests_agree_with_the_document(
    client: httpx.Client, path: str, method: str, mode: GenerationMode, share: float
) -> None:
    operation = schemathesis.openapi.from_dict(client.get("/openapi.json").json())[path][method]
    statuses: Counter[int] = Counter()

    @seed(1)
    @settings(
        max_examples=max(1, round(CASES / 2 * share)),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: Case[Any]) -> None:
        arguments = case.as_transport_kwargs(base_url="http://service")
        prepared: Any = requests.Request(**arguments).prepare()
        headers = {name: value.encode("latin-1") for name, value in prepared.headers.items()}
        response = client.request(prepared.method, prepared.url, headers=headers, content=prepared.body)
        statuses[response.status_code] += 1
        # A schema cannot require that a string is the base64 of an image; `check` handles 5xx.
        case.validate_response(response, excluded_checks=[positive_data_acceptance, not_a_server_error])
        if path == "/predict":
            check(response)
        else:
            assert response.status_code < 500

    send()
    print(f"{mode} {method} {path}: {statuses.total()} cases, {dict(statuses)}")
    if mode is GenerationMode.POSITIVE and path != "/models/{name}":  # the document does not list the models
        assert statuses[200], statuses


# Hostile files and bodies


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_hostile_requests_cause_no_server_error_and_no_memory_growth(client: httpx.Client) -> None:
    cases = CASES // 2
    statuses: Counter[int] = Counter()
    warm = 0
    for number in range(cases):
        if number == cases // 4:
            gc.collect()
            warm = resident()
        maker = MAKERS[number % len(MAKERS)]
        response = client.post("/predict", **maker(np.random.default_rng(number)))
        try:
            check(response)
        except AssertionError as error:
            error.add_note(f"{maker.__name__}, number {number}")
            raise
        statuses[response.status_code] += 1
    gc.collect()
    growth = resident() - warm
    print(f"{cases} cases: {dict(statuses)}; memory grew by {growth / 2**20:.1f} MiB")
    assert set(statuses) >= {200, 400, 413, 415, 422}
    assert growth < GROWTH
    assert client.get("/readyz").status_code == 200
