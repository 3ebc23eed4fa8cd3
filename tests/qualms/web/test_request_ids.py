import re

import pytest

from qualms.web.request_ids import request_id_from


@pytest.mark.parametrize("given", [b"a", b"b2f1c5d0-9c1e-4d57", b"trace:1.2_3", b"x" * 128])
def test_a_fit_id_is_kept(given: bytes) -> None:
    assert request_id_from({b"x-request-id": given}) == given.decode()


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"a b", b"a\n", b"\xc3\xa9", b'"', b"a/b"])
def test_an_unfit_id_is_replaced(given: bytes) -> None:
    assert re.fullmatch("[0-9a-f]{32}", request_id_from({b"x-request-id": given}))


def test_each_request_without_an_id_gets_another() -> None:
    assert len({request_id_from({}) for _ in range(100)}) == 100
