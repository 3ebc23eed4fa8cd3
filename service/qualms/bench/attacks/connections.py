"""Attacks by connections: pipelined requests, replies that are not read, many connections, early disconnects."""

from itertools import repeat

from qualms.bench.attacks.definition import Script, Wait, attack, head, post
from qualms.bench.load.sample_images import draw_colour_pngs

_LIVEZ = head("GET /livez")


def _picture() -> bytes:
    return draw_colour_pngs(1)[0]


@attack("pipelined-gets", "pipelined GET /livez on one connection")
def pipelined_gets(_: bytes) -> Script:
    """A server that answers all requests of one read in a row lets other connections wait."""
    yield from repeat(_LIVEZ * 1000)


@attack("pipelined-gets-unread", "pipelined GET /livez on one connection; replies are not read", reads=False)
def pipelined_gets_unread(_: bytes) -> Script:
    """A server that does not stop reading collects requests or replies."""
    yield from repeat(_LIVEZ * 1000)


@attack("pipelined-predicts", "pipelined POST /predict on one connection", payload=_picture)
def pipelined_predicts(picture: bytes) -> Script:
    """Requests of one connection should not delay those of others."""
    yield from repeat(post(picture) * 50)


@attack(
    "pipelined-predicts-unread",
    "pipelined POST /predict on 16 connections; replies are not read",
    payload=_picture,
    connections=16,
    reads=False,
)
def pipelined_predicts_unread(picture: bytes) -> Script:
    """Both requests and replies may be collected."""
    yield from repeat(post(picture) * 50)


@attack("unread-metrics", "GET /metrics on 64 connections; replies are not read", connections=64, reads=False)
def unread_metrics(_: bytes) -> Script:
    """The replies are larger than the requests."""
    yield from repeat(head("GET /metrics") * 10)


@attack("unread-openapi", "GET /openapi.json on 64 connections; replies are not read", connections=64, reads=False)
def unread_openapi(_: bytes) -> Script:
    """The replies are much larger than the requests."""
    yield from repeat(head("GET /openapi.json") * 10)


@attack("metrics-flood", "GET /metrics at full rate", connections=8)
def metrics_flood(_: bytes) -> Script:
    """Metrics are formatted for each request."""
    while True:
        yield head("GET /metrics")
        yield Wait.REPLY


@attack("docs-flood", "GET /docs and /openapi.json at full rate", connections=8)
def docs_flood(_: bytes) -> Script:
    """Pages that are not made for load."""
    while True:
        yield head("GET /docs")
        yield Wait.REPLY
        yield head("GET /openapi.json")
        yield Wait.REPLY


@attack("silent-connections", "2,000 connections that send nothing", connections=2000)
def silent_connections(_: bytes) -> Script:
    """File descriptors run out, unless such connections are closed or limited."""
    yield Wait.CLOSE


@attack("idle-connections", "2,000 connections that send one request and stay open", connections=2000)
def idle_connections(_: bytes) -> Script:
    """As above, but each has been useful once."""
    yield _LIVEZ
    yield Wait.REPLY
    yield Wait.CLOSE


@attack("churn", "connections that are reset as soon as they are open", connections=64, resets=True, pause=0.0)
def churn(_: bytes) -> Script:
    """Thousands a second; each costs the server some setup."""
    yield b"G"


@attack("aborted-predicts", "POST /predict, reset before the reply", payload=_picture, connections=32, resets=True)
def aborted_predicts(picture: bytes) -> Script:
    """The server works for replies that no one receives."""
    yield post(picture)


@attack("closed-predicts", "POST /predict, closed before the reply", payload=_picture, connections=16, pause=0.02)
def closed_predicts(picture: bytes) -> Script:
    """As above, with FIN: the server learns of it only when it reads again."""
    yield post(picture)
