import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock


@pytest.fixture(scope="module", autouse=True)
def one_container_module_at_a_time(request: pytest.FixtureRequest) -> Iterator[None]:
    """Modules marked `container` wait for each other: on two workers their alerts would be late for lack of CPU."""
    if request.node.get_closest_marker("container") is None:
        yield
        return
    with FileLock(Path(tempfile.gettempdir()) / "qualms-container-tests.lock"):
        yield
