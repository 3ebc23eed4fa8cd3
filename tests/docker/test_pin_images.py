"""Digests are written into copies of the real files. Registries are not asked here: no test depends on a network."""

from pathlib import Path

import pytest
from docker.pin_images import FILES, PinError, images, main, pinned

DIGEST = "sha256:" + "ab" * 32


@pytest.fixture
def copies(tmp_path: Path) -> tuple[Path, ...]:
    paths = tuple(tmp_path / path.name for path in FILES)
    for path, original in zip(paths, FILES, strict=True):
        path.write_text(pinned(original.read_text(encoding="utf-8"), {}), encoding="utf-8")
    return paths


def test_every_image_with_a_tag_is_found_and_stages_are_not(copies: tuple[Path, ...]) -> None:
    dockerfile, compose = (images(path.read_text(encoding="utf-8")) for path in copies)
    assert dockerfile == ["python:3.11-slim"]
    assert [name.partition(":")[0] for name in compose] == ["prom/prometheus", "prom/alertmanager", "grafana/grafana"]


def test_pinning_changes_the_images_alone_and_unpinning_undoes_it(copies: tuple[Path, ...]) -> None:
    before = [path.read_text(encoding="utf-8") for path in copies]
    assert main([], lambda name: DIGEST, copies) == 0
    after = [path.read_text(encoding="utf-8") for path in copies]
    assert [text.replace(f"@{DIGEST}", "") for text in after] == before
    assert f"FROM python:3.11-slim@{DIGEST} AS build\n" in after[0]
    assert after[0].count(DIGEST) == 2
    assert after[1].count(DIGEST) == 3
    assert main(["--unpin"], lambda name: DIGEST, copies) == 0
    assert [path.read_text(encoding="utf-8") for path in copies] == before


def test_pinning_again_replaces_the_digests(copies: tuple[Path, ...]) -> None:
    main([], lambda name: DIGEST, copies)
    other = DIGEST.replace("ab", "cd")
    main([], lambda name: other, copies)
    assert all(DIGEST not in path.read_text(encoding="utf-8") for path in copies)
    assert copies[0].read_text(encoding="utf-8").count(other) == 2


def test_nothing_is_written_if_one_image_cannot_be_resolved(
    copies: tuple[Path, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    before = [path.read_text(encoding="utf-8") for path in copies]

    def fail_for_grafana(name: str) -> str:
        if name.startswith("grafana"):
            raise PinError(f"{name}: no such host")
        return DIGEST

    assert main([], fail_for_grafana, copies) == 1
    assert [path.read_text(encoding="utf-8") for path in copies] == before
    assert capsys.readouterr().err.startswith("Nothing was written: grafana/grafana:")
