"""Variables that Kubernetes adds to a pod for each service of its namespace ("service links").

A service `qualms` adds QUALMS_PORT=tcp://10.0.0.1:8000, QUALMS_SERVICE_HOST=10.0.0.1 and others, a service `qualms-cpu` the
same with QUALMS_CPU_. They look like settings. To keep a misspelt setting an error, a variable counts as a service link only if
name and value are those that Kubernetes would choose: `QUALMS_…_PORT` and `QUALMS_…_PORT_8000_TCP` with a URL as the value,
which no setting has, and the others only if they agree with such a URL of the same service.
"""

import re
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import NamedTuple

_NAME = re.compile(r"(?P<service>\w+?)_PORT(?:_(?P<port>\d+)_(?P<protocol>TCP|UDP|SCTP))?")
_URL = re.compile(r"(?P<protocol>tcp|udp|sctp)://(?P<address>[\d.]+|\[[\da-f:.]+\]):(?P<port>[1-9]\d{0,4})")
_NAMED_PORT = re.compile("(?=_SERVICE_PORT_.)")


class _Endpoint(NamedTuple):
    service: str
    """the service's name as a variable, for example QUALMS_CPU"""
    protocol: str
    address: str
    port: str


def service_links(environment: Mapping[str, str], prefix: str) -> set[str]:
    """Names of the variables of services whose variables begin with `prefix`, for example QUALMS_."""
    candidates = {name: value for name, value in environment.items() if name.startswith(prefix)}
    links: set[str] = set()
    endpoints: set[_Endpoint] = set()
    for name, value in candidates.items():
        endpoint = _endpoint(name, value)
        if endpoint is not None:
            links.add(name)
            endpoints.add(endpoint)
    expected = {pair for endpoint in endpoints for pair in _other_variables(endpoint)}
    for name, value in candidates.items():
        # Services and ports may themselves be called service-port, so every occurrence counts.
        ports = (name[: found.start()] + "_SERVICE_PORT" for found in _NAMED_PORT.finditer(name))
        if (name, value) in expected or any((port, value) in expected for port in ports):
            links.add(name)
    return links


def _endpoint(name: str, value: str) -> _Endpoint | None:
    """The endpoint in a variable `…_PORT` or `…_PORT_8000_TCP`; None if name or value are not of this kind."""
    variable, url = _NAME.fullmatch(name), _URL.fullmatch(value)
    if variable is None or url is None or int(url["port"]) > 65535:
        return None
    if variable["port"] and (variable["port"], variable["protocol"].lower()) != (url["port"], url["protocol"]):
        return None
    address = url["address"].strip("[]")
    try:
        ip_address(address)
    except ValueError:
        return None
    return _Endpoint(variable["service"], url["protocol"], address, url["port"])


def _other_variables(endpoint: _Endpoint) -> Iterator[tuple[str, str]]:
    """Names and values of the other variables that Kubernetes adds with an endpoint, but for those of named ports."""
    link = f"{endpoint.service}_PORT_{endpoint.port}_{endpoint.protocol.upper()}"
    yield f"{endpoint.service}_SERVICE_HOST", endpoint.address
    yield f"{endpoint.service}_SERVICE_PORT", endpoint.port
    yield f"{link}_PROTO", endpoint.protocol
    yield f"{link}_PORT", endpoint.port
    yield f"{link}_ADDR", endpoint.address
