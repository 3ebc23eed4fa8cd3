"""Settings of the service, from QUALMS_* variables and the command line; what is misspelt stops the start.

A variable that nobody reads is a limit that nobody enforces, so an unknown QUALMS_* name is an error too.
"""

import os
from difflib import SequenceMatcher
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from qualms.errors import QualmsError

PREFIX = "QUALMS_"

_OTHERS = frozenset({"QUALMS_DATA", "QUALMS_MIRROR"})
"""read by training, which may share the environment"""

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SettingsError(QualmsError):
    """A setting is unknown or has a value that is not accepted."""


class Settings(BaseSettings):
    """Everything that can be set; each field is the variable QUALMS_ + its name in capitals."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", protected_namespaces=()
    )

    model: str | None = Field(None, description="A bundle's path or an embedded model's name; else the default.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, description="Port to listen on; 0 for any free one.", ge=0, le=65535)
    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto", description="Where the model runs: auto is CUDA if it really works, else the CPU."
    )
    threads: Count | None = Field(None, description="ONNX Runtime's threads; else as many as there are cores to use.")
    decode_threads: Count | None = Field(None, description="Image decoding threads; else chosen from the cores.")
    max_batch: Count = Field(
        64, description="Most images in one run; fewer if they took over a quarter of the deadline."
    )
    request_timeout_seconds: Seconds = Field(10.0, description="Deadline of requests without X-Request-Timeout.")
    max_request_timeout_seconds: Seconds | None = Field(
        None, description="Longest deadline that X-Request-Timeout may ask for; else 60, or request_timeout_seconds."
    )
    max_body_bytes: Count = Field(16 * 2**20, description="Largest request body.")
    max_upload_bytes: Count | None = Field(
        None, description="Memory for all bodies that are on their way; else 256 MiB, or max_body_bytes."
    )
    max_pixels: Count = Field(2**24, description="Largest image, checked before it is decoded.")
    max_images: Count = Field(64, description="Most images in one request.")
    max_json_depth: int = Field(16, description="Deepest nesting of a JSON body; pixel arrays need 5.", ge=5)
    drain_seconds: float = Field(
        5.0,
        description="After SIGTERM, how long requests still flow while readiness says 503.",
        ge=0,
        allow_inf_nan=False,
    )
    grace_seconds: Seconds = Field(30.0, description="From SIGTERM to exit, in all; at least drain_seconds.")
    log_level: Literal["debug", "info", "warning", "error", "critical"] = Field(
        "info", description="Least severe records that are logged."
    )

    @property
    def longest_run_seconds(self) -> float:
        """What a batch may take: whoever just misses one has to wait for it, and then for its own."""
        return self.request_timeout_seconds / 4

    @field_validator("host")
    @classmethod
    def _names_an_address(cls, host: str) -> str:
        if not host.strip():  # the socket would take it for every interface there is
            raise ValueError("it should be an address, such as 127.0.0.1, or 0.0.0.0 for all interfaces")
        return host

    @property
    def longest_timeout_seconds(self) -> float:
        """The longest deadline of a request, whoever names it."""
        return self.max_request_timeout_seconds or max(60.0, self.request_timeout_seconds)

    @property
    def upload_bytes(self) -> int:
        """What all bodies on their way may take."""
        return self.max_upload_bytes or max(256 * 2**20, self.max_body_bytes)

    @model_validator(mode="after")
    def _limits_agree(self) -> Self:
        for name, least in (
            ("grace_seconds", "drain_seconds"),
            ("max_upload_bytes", "max_body_bytes"),
            ("max_request_timeout_seconds", "request_timeout_seconds"),
        ):
            value, bound = getattr(self, name), getattr(self, least)
            if value is not None and value < bound:
                raise ValueError(
                    f"{PREFIX}{name.upper()} is {value:.12g}; it should be at least {PREFIX}{least.upper()}, {bound:.12g}"
                )
        return self


def load_settings(**overrides: Any) -> Settings:
    """Settings from the environment, with whatever is given here, other than None, in place of it."""
    given = {name: value for name, value in overrides.items() if value is not None}
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    for variable in sorted(os.environ):
        if variable.upper().startswith(PREFIX) and variable.upper() not in known | _OTHERS:
            raise SettingsError(f"The variable {variable} is unknown; the nearest is {_nearest(variable, known)}.")
    try:
        return Settings(**given)
    except ValidationError as error:
        raise SettingsError(_sentence(error, given)) from None


def variables() -> list[tuple[str, str]]:
    """Each variable with its default, as `QUALMS_PORT=8000`, and what it sets, for a person to read."""
    return [
        (PREFIX + name.upper() + ("" if field.default is None else f"={field.default}"), field.description or "")
        for name, field in Settings.model_fields.items()
    ]


def _sentence(error: ValidationError, given: dict[str, Any]) -> str:
    """The first problem pydantic found, by the name that the user knows it under."""
    problem = error.errors(include_url=False)[0]
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return f"{message}."
    name = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        return f"The setting {name} is unknown; the nearest is {_nearest(name, set(Settings.model_fields))}."
    shown = f"The setting {name}" if name in given else PREFIX + name.upper()
    return f"{shown} is {problem['input']!r}; {message.replace('Input', 'it', 1).partition(', unable')[0]}."


def _nearest(name: str, known: set[str]) -> str:
    return max(sorted(known), key=lambda other: SequenceMatcher(None, name.upper(), other.upper()).ratio())
