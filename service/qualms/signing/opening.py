"""Open a model, with or without a list of trusted keys."""

from pathlib import Path

from qualms.bundle.embedded import is_embedded, resolve_model
from qualms.bundle.file import Bundle, open_bundle


def open_trusted(model: str | None, trusted_keys: str | None) -> Bundle:
    """Open a bundle by its path or an embedded model by its name; with a file of trusted keys, only if one of them signed it.

    Embedded models need no signature: they are part of the package, and can be replaced only with its code.
    """
    path = resolve_model(model)
    if trusted_keys is None:
        return open_bundle(path)
    from qualms.signing.keys import TrustedKeys  # noqa: PLC0415  # takes memory that most services do not need

    keys = TrustedKeys.read(Path(trusted_keys))  # also before an embedded model: a mistake here is reported at once
    return open_bundle(path, None if is_embedded(path) else keys.verify)
