"""Distribution of tests over pytest-xdist's workers (`--dist loadgroup` in pyproject.toml)."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run each file on one worker, because its fixtures are expensive, and all container tests on the same one."""
    for item in items:
        container = item.get_closest_marker("container") is not None
        item.add_marker(pytest.mark.xdist_group("container" if container else str(item.path)))
