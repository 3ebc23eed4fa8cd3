"""The list of components that docker/sbom.py writes, of the environment that runs the tests and of a Debian status file."""

import json
import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from docker.sbom import debian_components, document, normalised, wheel_hashes
from tests.docker.stack import DOCKER

STATUS = """Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u10
Depends: libgcc-s1
Description: GNU C Library
 Version: not this one

Package: removed
Status: deinstall ok config-files
Architecture: amd64
Version: 1:2.0

Package: libstdc++6
Status: install ok installed
Architecture: amd64
Version: 1:12.2.0-14
"""


def report(packages: dict[str, str]) -> dict[str, Any]:
    """pip's report of an installation, with the fields that are used; the hashes are not those of real files."""
    return {
        "install": [
            {
                "metadata": {"name": name, "version": version},
                "download_info": {"archive_info": {"hashes": {"sha256": f"{number:064x}"}}},
            }
            for number, (name, version) in enumerate(packages.items())
        ]
    }


def distributions() -> list[metadata.Distribution]:
    """The packages of this environment, without those that a package such as Ray brings in a folder of its own."""
    return list(metadata.distributions(path=[sysconfig.get_path("purelib")]))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The output of two runs."""
    path = tmp_path_factory.mktemp("report") / "report.json"
    path.write_text(json.dumps(report({one.metadata["Name"]: one.version for one in distributions()})))
    command = [sys.executable, str(DOCKER / "sbom.py"), str(path)]
    return [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]


def test_the_document_is_valid_cyclonedx(written: list[str]) -> None:
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(written[0]) is None
    broken = json.loads(written[0])
    broken["components"][0]["kind"] = "library"
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(broken)) is not None


def test_the_same_packages_give_the_same_document(written: list[str]) -> None:
    assert written[0] == written[1]


def test_every_installed_package_is_listed_and_qualms_is_the_subject(written: list[str]) -> None:
    parsed = json.loads(written[0])
    installed = {normalised(one.metadata["Name"]): one.version for one in distributions()}
    purls = [one["purl"] for one in parsed["components"]]
    listed = dict(unquote(purl).removeprefix("pkg:pypi/").split("@") for purl in purls if purl.startswith("pkg:pypi/"))
    assert listed | {"qualms": metadata.version("qualms")} == installed
    assert parsed["metadata"]["component"]["name"] == "qualms"
    assert len({one["bom-ref"] for one in parsed["components"]}) == len(parsed["components"])


def test_a_package_without_a_hash_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report({"numpy": "1"})))
    done = subprocess.run([sys.executable, DOCKER / "sbom.py", path], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "KeyError" in done.stderr


def test_hashes_are_read_from_old_and_new_reports_of_pip() -> None:
    new = report({"Some.Name": "1.0"})
    old = {
        "install": [
            {"metadata": {"name": "b", "version": "2"}, "download_info": {"archive_info": {"hash": "sha256=ff"}}}
        ]
    }
    assert wheel_hashes([new, old]) == {("some-name", "1.0"): "0" * 64, ("b", "2"): "ff"}


def test_installed_debian_packages_have_package_urls() -> None:
    purls = [one["purl"] for one in debian_components(STATUS, "bookworm")]
    assert purls == [
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64&distro=bookworm",
        "pkg:deb/debian/libstdc%2B%2B6@1%3A12.2.0-14?arch=amd64&distro=bookworm",
    ]


def test_the_serial_number_depends_on_the_components() -> None:
    ours = {
        "type": "library",
        "bom-ref": "pkg:pypi/qualms@1",
        "name": "qualms",
        "version": "1",
        "purl": "pkg:pypi/qualms@1",
    }
    numbers = {document([ours, *debian_components(STATUS, name)])["serialNumber"] for name in ("bookworm", "trixie")}
    assert len(numbers) == 2
    assert all(re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", number) for number in numbers)
