"""Other addresses than loopback need keys, client certificates, or an explicit setting."""

import logging
from typing import Any

import pytest

from qualms.access.exposure import check_exposure, is_loopback, log_exposure
from qualms.settings import Settings, SettingsError


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    check_exposure(Settings(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "unknown.invalid"])
def test_other_addresses_need_keys_or_an_explicit_setting(host: str) -> None:
    with pytest.raises(SettingsError, match=r"QUALMS_KEYS_FILE, or QUALMS_ALLOW_ANONYMOUS=true") as error:
        check_exposure(Settings(host=host))
    assert repr(host) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "given",
    [{"keys_file": "keys"}, {"allow_anonymous": True}, {"tls_cert": "c", "tls_key": "k", "tls_client_ca": "ca"}],
)
def test_keys_client_certificates_or_the_setting_are_enough(given: dict[str, Any]) -> None:
    check_exposure(Settings(host="0.0.0.0", **given))


def test_tls_alone_is_not_enough() -> None:
    with pytest.raises(SettingsError):
        check_exposure(Settings(host="0.0.0.0", tls_cert="c", tls_key="k"))


@pytest.mark.parametrize(
    ("given", "level", "message"),
    [
        ({"keys_file": "keys", "host": "0.0.0.0", "allow_anonymous": True}, "INFO", "requests need an API key"),
        ({}, "INFO", "only this machine can reach the service"),
        ({"host": "0.0.0.0", "allow_anonymous": True}, "WARNING", "anyone who can reach the service may use it"),
    ],
)
def test_the_log_names_the_setting_that_applies(
    given: dict[str, Any], level: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        log_exposure(Settings(**given))
    (record,) = caplog.records
    assert (record.levelname, message in record.getMessage()) == (level, True)
