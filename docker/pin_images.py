"""Pin the base images of the Dockerfile and the images of docker-compose.yml to digests, for releases.

python -m docker.pin_images             asks the registries: `python:3.11-slim` becomes `python:3.11-slim@sha256:…`
python -m docker.pin_images --unpin     back to the tags alone

The digest is that of the tag's list of platforms, so the same file works on all of them. Needs Docker and access to the registries;
nothing is written if one of the images cannot be resolved.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = (ROOT / "docker" / "Dockerfile", ROOT / "docker-compose.yml")
_IMAGE = re.compile(
    r"^(?P<before>FROM |\s+image: )(?P<image>[a-z0-9.:/_-]+/)?(?P<name>[a-z0-9._-]+:[\w.-]+)(?P<digest>@sha256:[0-9a-f]{64})?"
    r"(?=\s|$)",
    re.MULTILINE,
)
"""an image with a tag; stages of the Dockerfile have none"""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class PinError(Exception):
    """The digest of an image cannot be found."""


def images(text: str) -> list[str]:
    """The images of a file with their tags, in order and each once; those that are built here are left out."""
    names = [(match["image"] or "") + match["name"] for match in _IMAGE.finditer(text)]
    return [name for name in dict.fromkeys(names) if not name.startswith("qualms:")]


def pinned(text: str, digests: dict[str, str]) -> str:
    """The text with the digest of each image that has one in `digests`, and without the digests of all others."""

    def replace(match: re.Match[str]) -> str:
        name = (match["image"] or "") + match["name"]
        return match["before"] + name + (f"@{digests[name]}" if name in digests else "")

    return _IMAGE.sub(replace, text)


def registry_digest(image: str) -> str:
    """The digest that a registry has for a tag: pulls the image and reads the digest that Docker verified."""
    for command in (["docker", "pull", "--quiet", image], ["docker", "image", "inspect", image]):
        template = ["--format", '{{join .RepoDigests " "}}'] if "inspect" in command else []
        done = subprocess.run([*command, *template], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise PinError(f"{image}: {reason[0]}")
    found = {match[0] for match in _DIGEST.finditer(done.stdout)}
    if len(found) != 1:
        raise PinError(f"{image}: Docker has {len(found)} digests of it, and one is needed")
    return found.pop()


def main(
    arguments: list[str], digest_of: Callable[[str], str] = registry_digest, files: tuple[Path, ...] = FILES
) -> int:
    """Pin or unpin the images; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docker.pin_images", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--unpin", action="store_true", help="remove the digests")
    options = parser.parse_args(arguments)
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    names = dict.fromkeys(name for text in texts.values() for name in images(text))
    try:
        digests = {} if options.unpin else {name: digest_of(name) for name in names}
    except (PinError, OSError) as error:
        print(f"Nothing was written: {error}.", file=sys.stderr)
        return 1
    for path, text in texts.items():
        temporary = path.with_name(f"{path.name}.part")
        temporary.write_text(pinned(text, digests), encoding="utf-8")
        temporary.replace(path)
    for name, digest in digests.items():
        print(f"{name}@{digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
