import os
import re
from typing import Any

import pytest
from pydantic import ValidationError

from qualms.errors import QualmsError
from qualms.settings import Settings, SettingsError, ignored_variables, load_settings, variables


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all QUALMS_ variables, so that a test sees only those it sets."""
    for name in list(os.environ):
        if name.upper().startswith("QUALMS_"):
            monkeypatch.delenv(name)


def test_defaults_listen_on_loopback_and_set_limits() -> None:
    settings = load_settings()
    assert (settings.model, settings.host, settings.port) == (None, "127.0.0.1", 8000)
    assert settings.max_body_bytes == 16 * 1024 * 1024
    assert settings.drain_seconds < settings.grace_seconds


def test_arguments_take_precedence_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUALMS_PORT", "9000")
    monkeypatch.setenv("QUALMS_THREADS", "3")
    monkeypatch.setenv("QUALMS_DEVICE", "cpu")
    settings = load_settings(port=0, device=None)
    assert (settings.port, settings.threads, settings.device) == (0, 3, "cpu")


def test_the_score_log_is_off_unless_it_has_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (load_settings().score_log, load_settings().score_log_images) == (None, 100_000)
    monkeypatch.setenv("QUALMS_SCORE_LOG", "scores.jsonl")
    monkeypatch.setenv("QUALMS_SCORE_LOG_IMAGES", "5000")
    assert (load_settings().score_log, load_settings().score_log_images) == ("scores.jsonl", 5000)


def test_an_empty_variable_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUALMS_THREADS", "")
    assert load_settings().threads is None


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("PORT", "abc", "QUALMS_PORT is 'abc'; it should be a valid integer."),
        ("PORT", "65536", "QUALMS_PORT is '65536'; it should be less than or equal to 65535."),
        ("DEVICE", "gpu", "QUALMS_DEVICE is 'gpu'; it should be 'auto', 'cuda' or 'cpu'."),
        ("THREADS", "0", "QUALMS_THREADS is '0'; it should be greater than or equal to 1."),
        ("REQUEST_TIMEOUT_SECONDS", "nan", "QUALMS_REQUEST_TIMEOUT_SECONDS is 'nan'; it should be a finite number."),
        ("REQUEST_TIMEOUT_SECONDS", "0", "QUALMS_REQUEST_TIMEOUT_SECONDS is '0'; it should be greater than 0."),
        ("SCORE_LOG_IMAGES", "0", "QUALMS_SCORE_LOG_IMAGES is '0'; it should be greater than or equal to 1."),
        ("MAX_JSON_DEPTH", "4", "QUALMS_MAX_JSON_DEPTH is '4'; it should be greater than or equal to 5."),
        ("DRAIN_SECONDS", "31", "QUALMS_GRACE_SECONDS is 30; it should be at least QUALMS_DRAIN_SECONDS, 31."),
    ],
)
def test_an_invalid_value_is_reported_with_its_variable_and_the_accepted_values(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(f"QUALMS_{name}", value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert str(caught.value) == expected


def test_an_invalid_argument_is_reported_by_the_name_of_the_setting() -> None:
    with pytest.raises(SettingsError, match=r"^The setting port is 70000; it should be less"):
        load_settings(port=70_000)


@pytest.mark.parametrize("host", ["", " "])
def test_an_empty_host_is_rejected_because_it_would_listen_on_all_interfaces(host: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(host=host)
    assert str(caught.value) == (
        f"The setting host is {host!r}; it should be an address, for example 127.0.0.1, or 0.0.0.0 for all interfaces."
    )


def test_an_empty_host_variable_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUALMS_HOST", "")
    assert load_settings().host == "127.0.0.1"


@pytest.mark.parametrize(
    ("name", "similar"), [("QUALMS_MAX_BATCHES", "QUALMS_MAX_BATCH"), ("qualms_prot", "QUALMS_PORT")]
)
def test_an_unknown_variable_is_an_error_naming_the_most_similar_one(
    monkeypatch: pytest.MonkeyPatch, name: str, similar: str
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert str(caught.value) == f"The variable {name} is unknown; the most similar one is {similar}."


def test_an_unknown_argument_is_an_error_naming_the_most_similar_one() -> None:
    with pytest.raises(SettingsError, match=r"^The setting thread is unknown; the most similar one is threads\.$"):
        load_settings(thread=1)


def test_variables_of_training_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUALMS_DATA", "folder")
    monkeypatch.setenv("QUALMS_MIRROR", "https://example.org")
    assert load_settings() == Settings()


SERVICE_LINKS = {
    "QUALMS_PORT": "tcp://10.0.0.1:9000",
    "QUALMS_SERVICE_HOST": "10.0.0.1",
    "QUALMS_SERVICE_PORT": "9000",
    "QUALMS_PORT_9000_TCP": "tcp://10.0.0.1:9000",
    "QUALMS_PORT_9000_TCP_ADDR": "10.0.0.1",
    "QUALMS_CPU_PORT": "tcp://10.0.0.2:80",
    "QUALMS_CPU_SERVICE_HOST": "10.0.0.2",
}


def test_service_links_of_kubernetes_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SERVICE_LINKS, "QUALMS_THREADS": "3"}.items():
        monkeypatch.setenv(name, value)
    assert (load_settings().port, load_settings().threads) == (8000, 3)
    assert load_settings(port=9001).port == 9001
    assert ignored_variables() == set(SERVICE_LINKS)


def test_a_port_in_the_environment_counts_beside_service_links(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SERVICE_LINKS, "QUALMS_PORT": "9002"}.items():
        monkeypatch.setenv(name, value)
    assert load_settings().port == 9002


@pytest.mark.parametrize(("name", "value"), [("QUALMS_SERVICE_PORT", "8000"), ("QUALMS_SERVER_HOST", "10.0.0.1")])
def test_a_misspelt_setting_is_an_error_beside_service_links(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    for link, url in SERVICE_LINKS.items():
        monkeypatch.setenv(link, url)
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=f"^The variable {name} is unknown"):
        load_settings()


def test_settings_are_frozen_and_each_has_a_description() -> None:
    with pytest.raises(ValidationError):
        Settings().port = 1  # type: ignore[misc]
    assert all(field.description for field in Settings.model_fields.values())


def test_variables_are_listed_with_their_defaults_and_descriptions() -> None:
    listed = variables()
    assert [variable.partition("=")[0] for variable, _ in listed] == [
        f"QUALMS_{name.upper()}" for name in Settings.model_fields
    ]
    assert ("QUALMS_PORT=8000", "Port to listen on; 0 selects a free port.") in listed
    assert {"QUALMS_MODEL", "QUALMS_MAX_UPLOAD_BYTES"} <= dict(listed).keys(), "no default value is listed"


def test_a_settings_error_is_a_qualms_error() -> None:
    assert issubclass(SettingsError, QualmsError)


@pytest.mark.parametrize(
    ("given", "timeout", "uploads"),
    [
        ({}, 60.0, 256 * 2**20),
        ({"request_timeout_seconds": 120, "max_body_bytes": 2**29}, 120.0, 2**29),
        ({"max_request_timeout_seconds": 15, "max_upload_bytes": 2**25}, 15.0, 2**25),
    ],
)
def test_unset_maximum_timeout_and_upload_memory_are_derived_from_the_limits_of_one_request(
    given: dict[str, Any], timeout: float, uploads: int
) -> None:
    settings = load_settings(**given)
    assert (settings.max_request_timeout_seconds, settings.max_upload_bytes) == (timeout, uploads)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"max_upload_bytes": 2**20},
            "QUALMS_MAX_UPLOAD_BYTES is 1048576; it should be at least QUALMS_MAX_BODY_BYTES",
        ),
        ({"max_request_timeout_seconds": 5}, "MAX_REQUEST_TIMEOUT_SECONDS is 5; it should be at least QUALMS_REQUEST"),
    ],
)
def test_a_maximum_below_the_limit_of_one_request_is_rejected(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        load_settings(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tls_cert": "c"}, "QUALMS_TLS_CERT is set without QUALMS_TLS_KEY; both are needed for TLS."),
        ({"tls_key": "k"}, "QUALMS_TLS_KEY is set without QUALMS_TLS_CERT; both are needed for TLS."),
        ({"tls_client_ca": "a"}, "QUALMS_TLS_CLIENT_CA is set without QUALMS_TLS_CERT; both are needed for TLS."),
        ({"management_port": 8000}, "QUALMS_MANAGEMENT_PORT is 8000, as QUALMS_PORT; it should be another port."),
        (
            {"trusted_proxies": "proxy"},
            "The setting trusted_proxies is 'proxy'; it should be addresses or networks, "
            "for example 10.0.0.2,192.168.0.0/16.",
        ),
    ],
)
def test_settings_of_access_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(**given)
    assert str(error.value) == message


def test_the_variable_of_clients_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUALMS_API_KEY", "token")
    load_settings()
