"""The commands `qualms sign`, `qualms verify` and `qualms signing-key`; their dependencies are imported only when they run."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="Path of a bundle or name of an embedded model.")]

signing_key = typer.Typer(
    name="signing-key", help="Key pairs that sign bundles.", no_args_is_help=True, add_completion=False
)


@signing_key.callback()
def _group() -> None:
    """Key pairs that sign bundles."""


@signing_key.command()
def new(
    file: Annotated[Path, typer.Argument(help="File of the private key; the public one is written to FILE.pub.")],
    name: Annotated[str | None, typer.Option(help="Name of the key.", show_default="the name of FILE")] = None,
) -> None:
    """Make an Ed25519 key pair, and print the public key: the line for the file in QUALMS_TRUSTED_KEYS."""
    from qualms.signing.keys import SigningKey

    typer.echo(SigningKey.generate().write(file, name or file.stem))


def sign(
    model: Model,
    key: Annotated[Path, typer.Option(help="File of the private key, made by qualms signing-key new.")],
    out: Annotated[
        Path | None, typer.Option(help="File of the signed bundle.", show_default="the signature is added to MODEL")
    ] = None,
) -> None:
    """Sign a bundle. The signature is part of the file, covers graph and manifest, and replaces an earlier one."""
    from qualms.bundle.embedded import is_embedded, resolve_model
    from qualms.bundle.file import sign_bundle
    from qualms.errors import BundleError
    from qualms.signing.keys import SigningKey

    path = resolve_model(model)
    if out is None and is_embedded(path):
        raise BundleError(
            f"{model} is an embedded model, which is not changed; name the file of a signed copy with --out."
        )
    bundle = sign_bundle(path, out or path, SigningKey.read(key).sign)
    typer.echo(f"Signed {bundle.path}; its digest is now {bundle.digest}.")


def verify(
    model: Model,
    keys: Annotated[
        Path, typer.Option(help="File of trusted public keys, one line NAME KEY each.", envvar="QUALMS_TRUSTED_KEYS")
    ],
) -> None:
    """Verify that a bundle was signed with one of the trusted keys and has not been changed since."""
    from qualms.bundle.embedded import resolve_model
    from qualms.bundle.file import open_bundle
    from qualms.signing.keys import TrustedKeys

    trusted = TrustedKeys.read(keys)
    bundle = open_bundle(resolve_model(model), trusted.verify)
    assert bundle.signature is not None
    typer.echo(f"{bundle.path} is signed by {trusted.names[bundle.signature.key]}.")
