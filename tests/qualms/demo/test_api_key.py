from pathlib import Path

import pytest

from qualms.demo.traffic import TrafficError, read_api_key


def test_the_key_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-file\n")
    assert read_api_key(tmp_path / "key", {"QUALMS_API_KEY": "from-variable"}) == "from-file"
    assert read_api_key(None, {"QUALMS_API_KEY": "from-variable"}) == "from-variable"
    assert read_api_key(None, {}) is None
    assert read_api_key(None, {"QUALMS_API_KEY": ""}) is None


@pytest.mark.parametrize("content", ["", "one two", "one\ntwo\n"])
def test_a_file_without_exactly_one_key_is_refused_without_its_content(tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content)
    with pytest.raises(TrafficError, match="should contain one API key") as error:
        read_api_key(tmp_path / "key", {})
    assert "two" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrafficError, match=r"none of the API key cannot be read: no such file"):
        read_api_key(tmp_path / "none", {})
