"""Files of a run folder: written under a temporary name and renamed, so that none is ever half there."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from qualms.files import atomic_path, write_bytes


def save_torch(path: Path, value: Any) -> None:
    """torch.save, atomically."""
    with atomic_path(path) as temporary:
        torch.save(value, temporary)


def save_json(path: Path, value: Any) -> None:
    """Indented JSON, atomically."""
    save_text(path, json.dumps(value, indent=2, sort_keys=False) + "\n")


def save_text(path: Path, text: str) -> None:
    """UTF-8 text, atomically."""
    write_bytes(path, text.encode())


def fingerprint(*parts: Any) -> str:
    """A short digest of JSON-able values: equal inputs of a stage, equal fingerprint."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]
