"""Settings of the service, read from QUALMS_* environment variables and the command line.

An unknown QUALMS_* variable is an error: a misspelt limit would otherwise be ignored silently. Variables that Kubernetes adds to
pods for a service named qualms are ignored, see `service_links`.
"""

import os
from difflib import SequenceMatcher
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from qualms.access.proxies import TrustedProxies
from qualms.errors import QualmsError
from qualms.machine.memory import available_memory
from qualms.service_links import service_links

PREFIX = "QUALMS_"

_OTHER_VARIABLES = frozenset({"QUALMS_DATA", "QUALMS_MIRROR", "QUALMS_API_KEY"})
"""read by training and by clients only; accepted here because all may run in the same environment"""

Device = Literal["auto", "cuda", "cpu"]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SettingsError(QualmsError):
    """A setting is unknown, or its value is not accepted."""


class Settings(BaseSettings):
    """All settings; the environment variable of a field is QUALMS_ followed by its name in upper case."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", protected_namespaces=()
    )

    model: str | None = Field(
        None, description="Path of a bundle or name of an embedded model; if unset, the embedded default model."
    )
    trusted_keys: str | None = Field(
        None,
        description="File of public keys; if set, a bundle is served only if one of them signed it. Embedded models need no "
        "signature.",
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, description="Port to listen on; 0 selects a free port.", ge=0, le=65535)
    keys_file: str | None = Field(
        None, description="File of API keys, made by qualms keys add; if set, requests need one of them."
    )
    allow_anonymous: bool = Field(
        False,
        description="Whether the service may listen on other addresses than loopback without keys and client certificates.",
    )
    tls_cert: str | None = Field(
        None, description="File with the certificate chain (PEM); if set, the service accepts https:// only."
    )
    tls_key: str | None = Field(None, description="File with the certificate's private key (PEM, without a password).")
    tls_client_ca: str | None = Field(
        None,
        description="File with CA certificates (PEM); if set, clients need a certificate that one of them has signed.",
    )
    management_host: str = Field("127.0.0.1", description="Address of the management port.")
    management_port: int | None = Field(
        None,
        description="Port with /metrics and the health checks, without keys and TLS; if set, /metrics is there only.",
        ge=0,
        le=65535,
    )
    trusted_proxies: str | None = Field(
        None,
        description="Addresses and networks of proxies, separated by commas, whose Forwarded or X-Forwarded-For headers "
        "give the client's address in logs.",
    )
    device: Device = Field(
        "auto", description="Device that runs the model; auto uses CUDA if it works, otherwise the CPU."
    )
    threads: Count | None = Field(
        None, description="Number of ONNX Runtime threads; if unset, the number of available cores."
    )
    decode_threads: Count | None = Field(
        None,
        description="Number of image decoding threads, and of worker processes; if unset, the number of available cores.",
    )
    max_batch: Count = Field(
        64,
        description="Maximum number of images in one run of the model; fewer where more images gain no throughput, need "
        "too much memory, or take longer than a quarter of request_timeout_seconds.",
    )
    request_timeout_seconds: Seconds = Field(
        10.0, description="Deadline of requests that have no X-Request-Timeout header."
    )
    max_request_timeout_seconds: Seconds = Field(
        default_factory=lambda data: max(60.0, data["request_timeout_seconds"]),
        description="Maximum value of X-Request-Timeout; if unset, the larger of 60 and request_timeout_seconds.",
    )
    max_connections: Count = Field(
        2048,
        description="Maximum number of open connections; fewer if the limit on open files or the memory does not allow "
        "as many.",
    )
    max_head_bytes: int = Field(
        64 * 2**10, description="Maximum size of the request line and headers of a request.", ge=1024
    )
    head_timeout_seconds: Seconds = Field(
        10.0, description="Time in which the request line and headers must arrive, from the first byte or the connect."
    )
    keep_alive_seconds: Seconds = Field(
        75.0, description="Time after which a connection without a request is closed; longer than that of your proxy."
    )
    send_timeout_seconds: Seconds = Field(
        20.0, description="Time after which a connection is reset if the client does not read its reply."
    )
    max_body_bytes: Count = Field(16 * 2**20, description="Maximum size of a request body.")
    max_upload_bytes: Count = Field(
        default_factory=lambda data: max(min(256 * 2**20, available_memory() // 8), data["max_body_bytes"]),
        description="Maximum memory for the bodies of all requests, from their arrival until they are decoded; the first "
        "64 KiB of a body do not count. If unset, 256 MiB, or an eighth of the container's memory if that is less, but at "
        "least max_body_bytes.",
    )
    max_pixels: Count = Field(2**24, description="Maximum number of pixels in an image, checked before decoding.")
    max_side: Count = Field(
        2**14, description="Maximum width and height of an image in pixels, checked before decoding."
    )
    max_decode_bytes: Count = Field(
        default_factory=lambda: min(448 * 2**20, available_memory() // 3),
        description="Maximum estimated memory of all images that are being decoded; three quarters of it for worker "
        "processes, which decode everything but plain JPEG and small PNG files. If unset, 448 MiB, or a third of the "
        "container's memory if that is less.",
    )
    max_images: Count = Field(64, description="Maximum number of images in one request.")
    max_json_numbers: Count = Field(2**22, description="Maximum number of pixel values in a JSON body.")
    max_json_depth: int = Field(16, description="Maximum nesting depth of a JSON body; pixel arrays need 5.", ge=5)
    drain_seconds: float = Field(
        5.0,
        description="Time after SIGTERM in which /readyz returns 503 but requests are still accepted.",
        ge=0,
        allow_inf_nan=False,
    )
    grace_seconds: Seconds = Field(
        30.0, description="Maximum time from SIGTERM to exit, including drain_seconds; at least drain_seconds."
    )
    score_log: str | None = Field(
        None, description="File to which the scores of served images are appended, for qualms calibrate --from-log."
    )
    score_log_images: Count = Field(100_000, description="Maximum number of images in the score log.")
    page: bool = Field(True, description="Whether there is a page at /, on which images can be tried.")
    log_level: Literal["debug", "info", "warning", "error", "critical"] = Field(
        "info", description="Minimum severity of log records."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Called by pydantic-settings: arguments, then the environment without Kubernetes' service links."""
        assert isinstance(env_settings, EnvSettingsSource)
        ignored = {name.lower() for name in ignored_variables()}
        env_settings.env_vars = {name: value for name, value in env_settings.env_vars.items() if name not in ignored}
        return init_settings, env_settings

    @property
    def max_run_seconds(self) -> float:
        """Maximum duration of one run: a request that just misses a run waits for that run and then for its own."""
        return self.request_timeout_seconds / 4

    @field_validator("host", "management_host")
    @classmethod
    def _check_host(cls, host: str) -> str:
        if not host.strip():  # a socket bound to an empty host listens on all interfaces
            raise ValueError("it should be an address, for example 127.0.0.1, or 0.0.0.0 for all interfaces")
        return host

    @field_validator("trusted_proxies")
    @classmethod
    def _check_proxies(cls, proxies: str | None) -> str | None:
        try:
            TrustedProxies(proxies)
        except ValueError:
            raise ValueError("it should be addresses or networks, for example 10.0.0.2,192.168.0.0/16") from None
        return proxies

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise ValueError(
                    f"{PREFIX}{name.upper()} is set without {PREFIX}{other.upper()}; both are needed for TLS"
                )
        if self.management_port and self.management_port == self.port:
            raise ValueError(
                f"{PREFIX}MANAGEMENT_PORT is {self.management_port}, as {PREFIX}PORT; it should be another port"
            )
        return self

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        for name, lower in (
            ("grace_seconds", "drain_seconds"),
            ("max_upload_bytes", "max_body_bytes"),
            ("max_request_timeout_seconds", "request_timeout_seconds"),
        ):
            value, bound = getattr(self, name), getattr(self, lower)
            if value < bound:
                raise ValueError(
                    f"{PREFIX}{name.upper()} is {value:.12g}; it should be at least {PREFIX}{lower.upper()}, {bound:.12g}"
                )
        return self


def load_settings(**overrides: Any) -> Settings:
    """Settings from the environment; overrides that are not None take precedence."""
    given = {name: value for name, value in overrides.items() if value is not None}
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    for variable in sorted(os.environ.keys() - ignored_variables()):
        if variable.upper().startswith(PREFIX) and variable.upper() not in known | _OTHER_VARIABLES:
            raise SettingsError(
                f"The variable {variable} is unknown; the most similar one is {_most_similar(variable, known)}."
            )
    try:
        return Settings(**given)
    except ValidationError as error:
        raise SettingsError(_describe(error, given)) from None


def ignored_variables() -> set[str]:
    """The QUALMS_* variables of the environment that are service links of Kubernetes, not settings."""
    return service_links(os.environ, PREFIX)


def variables() -> list[tuple[str, str]]:
    """Each variable with its default value, for example `QUALMS_PORT=8000`, and its description."""
    defaults = {name: field.default for name, field in Settings.model_fields.items() if field.default_factory is None}
    return [
        (PREFIX + name.upper() + _default_text(defaults.get(name)), field.description or "")
        for name, field in Settings.model_fields.items()
    ]


def _default_text(default: object) -> str:
    """`=` and the default value as one would write it in a variable; nothing if there is none."""
    if default is None:
        return ""
    return f"={str(default).lower() if isinstance(default, bool) else default}"


def _describe(error: ValidationError, given: dict[str, Any]) -> str:
    """The first error of pydantic; it names the variable, or the setting if that was passed as an argument."""
    problem = error.errors(include_url=False)[0]
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return f"{message}."
    name = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        return (
            f"The setting {name} is unknown; the most similar one is {_most_similar(name, set(Settings.model_fields))}."
        )
    label = f"The setting {name}" if name in given else PREFIX + name.upper()
    return f"{label} is {problem['input']!r}; {message.replace('Input', 'it', 1).partition(', unable')[0]}."


def _most_similar(name: str, known: set[str]) -> str:
    return max(sorted(known), key=lambda other: SequenceMatcher(None, name.upper(), other.upper()).ratio())
