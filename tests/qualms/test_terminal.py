"""Redirected output is not wrapped."""

import pytest
from rich.table import Table

from qualms.terminal import default_console


def test_tables_that_are_redirected_are_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name")
    table.add_row("x" * 300)
    default_console().print(table)
    assert "x" * 300 in capsys.readouterr().out
