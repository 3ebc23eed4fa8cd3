"""The Hugging Face Hub where there is no network: its cache alone, in place of requests that are repeated for a minute."""

import importlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from qualms.errors import first_line

HUB = ("hf_hub:", "hf-hub:")
"""timm's prefixes of models on the Hub"""
_SECONDS = 10.0
"""time to connect to the Hub"""


@contextmanager
def hub_or_cache() -> Iterator[str | None]:
    """In this context, the Hub's client looks into its cache alone if the Hub cannot be reached; the value is the reason then."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    reason = None if constants.HF_HUB_OFFLINE else _unreachable(constants.ENDPOINT)
    if reason is None:
        yield None
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield reason
    finally:
        constants.HF_HUB_OFFLINE = False


def hub_failure(error: Exception, unreachable: str | None) -> str:
    """Why a model could not be loaded from the Hub, for the parentheses of a sentence."""
    return unreachable or f"{type(error).__name__}: {first_line(error)}"


def _unreachable(endpoint: str) -> str | None:
    """Why no connection to a URL is possible; None if one is, or if a proxy would make it."""
    parts = urlsplit(endpoint)
    if parts.hostname is None or parts.scheme in getproxies() or "all" in getproxies():
        return None
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((parts.hostname, port), timeout=_SECONDS).close()
    except OSError as error:
        return f"{parts.hostname} cannot be reached: {error.strerror or error}"
    return None
