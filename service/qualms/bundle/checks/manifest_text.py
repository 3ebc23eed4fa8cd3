"""Parse the manifest's JSON text within limits on its size, because a short text can become large objects."""

import json
from typing import Any, Final, NoReturn

from qualms.errors import BundleError

MAX_VALUES: Final = 4_000_000
"""values of all lists and objects; indices of errors among 50,000 images in 48 settings are up to 2.4 million"""
MAX_MEMBERS: Final = 1_000_000
"""members of all objects; results for each of 21,841 classes have 262,000"""
MAX_OBJECT_MEMBERS: Final = 50_000
"""members of one object; an unknown member costs about 1 kB, because each is an error of its own"""


class _RefusedError(ValueError):
    """The text is JSON, but exceeds a limit or repeats a key; the message is the reason."""


def parse_object(text: str, source: str) -> dict[str, Any]:
    """The JSON object in `text`; the BundleError names `source` and the reason."""
    # Base64 has none of these characters, so the counts are close, and they cost a fraction of parsing.
    for character, limit, name in ((",", MAX_VALUES, "values"), (":", MAX_MEMBERS, "members of objects")):
        if (count := text.count(character)) > limit:
            _refuse(source, f"it has about {count:,} {name}, and at most {limit:,} are accepted")
    try:
        document = json.loads(text, object_pairs_hook=_object)
    except _RefusedError as error:
        _refuse(source, str(error))
    except (ValueError, RecursionError) as error:
        _refuse(source, f"it is not JSON ({error})")
    if not isinstance(document, dict):
        _refuse(source, "it is not a JSON object")
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_OBJECT_MEMBERS:
        raise _RefusedError(
            f"an object has {len(pairs):,} members, the first is {pairs[0][0][:80]!r}, and at most "
            f"{MAX_OBJECT_MEMBERS:,} are accepted"
        )
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _RefusedError("an object has two members of the same name")
    return members


def _refuse(source: str, reason: str) -> NoReturn:
    raise BundleError(f"{source} has a damaged manifest: {reason}.") from None
