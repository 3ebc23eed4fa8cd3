"""Where the tests on real data find it."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def data_dir() -> Path:
    """The user's data folder; a test that needs it is skipped where there is none."""
    folder = os.environ.get("QUALMS_DATA")
    if not folder:
        pytest.skip("QUALMS_DATA names no folder of real data sets")
    return Path(folder)
