"""Limits of this process's cgroup and of the groups above it, for cgroup v1 and v2."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def cgroup_folders(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """The version, 1 or 2, and the folder of every group that limits this process, for a v1 controller such as "cpu".

    `root` is the folder that contains proc/ and sys/. The root groups are always included: in a container, they are the
    container's groups, and the group named in proc/ may not exist. Folders may not exist either.
    """
    mount = root / "sys/fs/cgroup"
    for controllers, group in _memberships(root, controller):
        for folder in (group, *group.parents):
            if controllers == "":
                yield 2, mount / folder
            elif controller in controllers.split(","):
                yield 1, mount / controller / folder


def read(path: Path) -> str:
    """The text of a file without whitespace around it; empty if the file cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _memberships(root: Path, controller: str) -> list[tuple[str, PurePosixPath]]:
    """Return the controllers ("" for cgroup v2) and the group of each hierarchy, and always the root groups."""
    groups = [("", PurePosixPath()), (controller, PurePosixPath())]
    for line in read(root / "proc/self/cgroup").splitlines():
        controllers, separator, group = line.partition(":")[2].partition(":")
        if separator:
            groups.append((controllers, PurePosixPath(group.lstrip("/"))))
    return groups
