import pytest

from qualms.service_links import service_links

LINKS = {
    "QUALMS_SERVICE_HOST": "10.0.0.1",
    "QUALMS_SERVICE_PORT": "8000",
    "QUALMS_SERVICE_PORT_HTTP": "8000",
    "QUALMS_PORT": "tcp://10.0.0.1:8000",
    "QUALMS_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "QUALMS_PORT_8000_TCP_PROTO": "tcp",
    "QUALMS_PORT_8000_TCP_PORT": "8000",
    "QUALMS_PORT_8000_TCP_ADDR": "10.0.0.1",
}
"""the variables that the kubelet adds for a service `qualms` with one port `http`"""


def links(**environment: str) -> set[str]:
    return service_links(environment, "QUALMS_")


def test_all_variables_of_a_service_are_recognised() -> None:
    assert links(**LINKS) == set(LINKS)


def test_variables_of_a_service_whose_name_begins_with_qualms_are_recognised() -> None:
    renamed = {name.replace("QUALMS_", "QUALMS_GPU_2_", 1): value for name, value in LINKS.items()}
    assert links(**renamed) == set(renamed)


def test_a_service_and_a_port_called_service_port_are_recognised() -> None:
    renamed = {name.replace("QUALMS_", "QUALMS_SERVICE_PORT_", 1): value for name, value in LINKS.items()}
    renamed["QUALMS_SERVICE_PORT_SERVICE_PORT_SERVICE_PORT"] = "8000"
    assert links(**renamed) == set(renamed)


def test_a_port_that_the_manifest_sets_does_not_hide_the_other_variables() -> None:
    """Variables in a manifest replace service links of the same name."""
    assert links(**{**LINKS, "QUALMS_PORT": "9000"}) == set(LINKS) - {"QUALMS_PORT"}


def test_every_port_of_a_service_is_recognised() -> None:
    more = {
        "QUALMS_SERVICE_PORT_MANAGEMENT": "9000",
        "QUALMS_PORT_9000_TCP": "tcp://10.0.0.1:9000",
        "QUALMS_PORT_9000_TCP_PORT": "9000",
        "QUALMS_PORT_53_UDP": "udp://10.0.0.1:53",
        "QUALMS_PORT_53_UDP_PROTO": "udp",
    }
    assert links(**LINKS, **more) == set(LINKS) | set(more)


def test_ipv6_addresses_are_recognised() -> None:
    version_6 = {name: value.replace("10.0.0.1", "fd00::1") for name, value in LINKS.items()}
    version_6 |= dict.fromkeys(("QUALMS_PORT", "QUALMS_PORT_8000_TCP"), "tcp://[fd00::1]:8000")
    assert links(**version_6) == set(version_6)


@pytest.mark.parametrize(
    "value",
    [
        "8000",
        "tcp://10.0.0.1",
        "tcp://10.0.0.1:0",
        "tcp://10.0.0.1:65536",
        "http://10.0.0.1:8000",
        "tcp://10.0.0:1",
        "tcp://host:80",
    ],
)
def test_only_urls_with_an_address_and_a_port_are_links(value: str) -> None:
    assert links(QUALMS_PORT=value) == set()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("QUALMS_SERVICE_HOST", "0.0.0.0"),
        ("QUALMS_SERVICE_PORT", "9000"),
        ("QUALMS_SERVICE_PORT_HTTP", "9000"),
        ("QUALMS_SERVICE_PORT_", "8000"),
        ("QUALMS_GPU_SERVICE_HOST", "10.0.0.1"),
        ("QUALMS_PORT_8001_TCP", "tcp://10.0.0.1:8000"),
        ("QUALMS_PORT_8000_UDP", "tcp://10.0.0.1:8000"),
        ("QUALMS_PORT_8000_TCP_ADDR", "10.0.0.2"),
        ("QUALMS_PROT", "tcp://10.0.0.1:8000"),
        ("QUALMS_MODEL", "tcp://10.0.0.1:8000"),
        ("qualms_port", "tcp://10.0.0.1:8000"),
    ],
)
def test_a_variable_that_disagrees_with_the_service_is_not_a_link(name: str, value: str) -> None:
    assert name not in links(**{**LINKS, name: value})


@pytest.mark.parametrize("name", ["QUALMS_SERVICE_HOST", "QUALMS_SERVICE_PORT", "QUALMS_SERVICE_PORT_HTTP"])
def test_host_and_port_without_a_url_of_the_service_are_not_links(name: str) -> None:
    """They may be misspelt settings, and Kubernetes never adds them alone."""
    assert links(**{name: LINKS[name]}) == set()
