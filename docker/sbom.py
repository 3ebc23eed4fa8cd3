"""Write the software bill of materials (SBOM) of an image as CycloneDX 1.6 JSON. The Dockerfile runs this in the build stage.

python sbom.py REPORT... > sbom.cdx.json     REPORT: files that `pip install --report` wrote

It lists the Python packages of the interpreter that runs it, with the SHA-256 of their wheels, Python itself, and the Debian
packages. It contains no times and no random numbers, so two builds of the same packages give the same file.
"""

import hashlib
import json
import platform
import re
import sys
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

DPKG_STATUS = Path("/var/lib/dpkg/status")
OS_RELEASE = Path("/etc/os-release")
OURS = "qualms"
Component = dict[str, Any]


def normalised(name: str) -> str:
    """The name of a Python package as the index and package URLs spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def wheel_hashes(reports: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """SHA-256 of each installed file by name and version, from pip's reports."""
    hashes = {}
    for report in reports:
        for item in report["install"]:
            archive = item["download_info"]["archive_info"]
            digest = archive.get("hashes", {}).get("sha256") or archive["hash"].removeprefix("sha256=")
            hashes[normalised(item["metadata"]["name"]), item["metadata"]["version"]] = digest
    return hashes


def python_components(hashes: dict[tuple[str, str], str]) -> list[Component]:
    """The installed Python packages; KeyError if one of them is in no report."""
    components = []
    for distribution in metadata.distributions():
        name, version = normalised(distribution.metadata["Name"]), distribution.version
        component = _component("library", name, version, f"pkg:pypi/{name}@{quote(version, safe='')}")
        component["hashes"] = [{"alg": "SHA-256", "content": hashes[name, version]}]
        if "License-Expression" in distribution.metadata:
            component["licenses"] = [{"expression": distribution.metadata["License-Expression"]}]
        components.append(component)
    return components


def debian_components(status: str, codename: str) -> list[Component]:
    """The installed packages in the text of dpkg's status file."""
    components = []
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^([\w-]+): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status") == "install ok installed":
            name, version, architecture = fields["Package"], fields["Version"], fields["Architecture"]
            qualifiers = f"arch={architecture}&distro={codename}"
            purl = f"pkg:deb/debian/{quote(name, safe='')}@{quote(version, safe='')}?{qualifiers}"
            components.append(_component("library", name, version, purl))
    return components


def document(components: list[Component]) -> dict[str, Any]:
    """The whole document. Our own package is the subject, not one of the components; its serial number follows from its content."""
    ordered = sorted(components, key=lambda component: str(component["bom-ref"]))
    (subject,) = (one for one in ordered if one["bom-ref"].startswith(f"pkg:pypi/{OURS}@"))
    digest = hashlib.sha256(json.dumps(ordered).encode()).hexdigest()
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, digest)}",
        "version": 1,
        "metadata": {"component": {**subject, "type": "application"}},
        "components": [one for one in ordered if one is not subject],
    }


def main(arguments: list[str]) -> None:
    """Print the document of this environment."""
    reports = [json.loads(Path(name).read_text(encoding="utf-8")) for name in arguments]
    components = python_components(wheel_hashes(reports))
    version = platform.python_version()
    components.append(_component("application", "python", version, f"pkg:generic/python@{version}"))
    if DPKG_STATUS.exists():
        match = re.search(r"^VERSION_CODENAME=(\w+)$", OS_RELEASE.read_text(encoding="utf-8"), re.MULTILINE)
        codename = match[1] if match else "unknown"
        components += debian_components(DPKG_STATUS.read_text(encoding="utf-8"), codename)
    json.dump(document(components), sys.stdout, indent=1)
    sys.stdout.write("\n")


def _component(kind: str, name: str, version: str, purl: str) -> Component:
    return {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl}


if __name__ == "__main__":
    main(sys.argv[1:])
