import copy
import pickle
import re
from pathlib import Path

import pytest

from qualms import errors
from qualms.errors import ImageError, OperatingPointError, first_line

ROOT = Path(__file__).parents[2]


def test_the_exception_tree_in_the_docstring_lists_every_exception_and_its_module() -> None:
    documented = dict(re.findall(r"^[├└]── (\w+) .*?(?:\(([\w.]+)\))?$", errors.__doc__ or "", re.MULTILINE))
    defined = {
        name: ".".join(path.relative_to(ROOT / folder).with_suffix("").parts)
        for folder in ("service", "training")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"^class (\w+)\(QualmsError\)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {name: module or errors.__name__ for name, module in documented.items()} == defined


@pytest.mark.parametrize("error", [ImageError("no", reason="shape"), OperatingPointError("no", "score")])
def test_errors_with_other_arguments_than_their_message_survive_pickling(error: errors.QualmsError) -> None:
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # our own bytes
        assert (type(same), str(same), vars(same)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("libcudnn is missing.\nat line 3"), "libcudnn is missing"),
        (RuntimeError("\n  no kernel . \n"), "no kernel"),
        (RuntimeError(), "RuntimeError"),
        (KeyError("..."), "'...'"),
        (ValueError("."), "ValueError"),
    ],
)
def test_first_line_has_no_full_stop_and_is_never_empty(error: Exception, expected: str) -> None:
    assert first_line(error) == expected
