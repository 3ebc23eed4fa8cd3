"""Attacks by hostile image files: each file by itself, many in one form, and as base64 in JSON."""

from base64 import b64encode
from collections.abc import Callable

from qualms.bench.attacks.bodies import repeated_request
from qualms.bench.attacks.definition import attack, post
from qualms.bench.attacks.files.definition import HostileFile
from qualms.bench.attacks.files.registry import FILES
from qualms.bench.attacks.payloads import FORM, form_body

_CONNECTIONS = 8
_MAX_IMAGES = 64
"""the service's default limit, QUALMS_MAX_IMAGES"""
_SMALL_SCALE = 0.001


def _register(name: str, description: str, payload: Callable[[], bytes]) -> None:
    attack(name, description, payload=payload, connections=_CONNECTIONS)(repeated_request)


def _alone(file: HostileFile) -> Callable[[], bytes]:
    return lambda: post(file.make(), file.content_type)


def _form(file: HostileFile) -> Callable[[], bytes]:
    return lambda: post(form_body([file.make()] * _MAX_IMAGES), FORM)


def _json(file: HostileFile) -> Callable[[], bytes]:
    def make() -> bytes:
        image = b'"%b"' % b64encode(file.make())
        return post(b'{"images": [' + b",".join([image] * _MAX_IMAGES) + b"]}", "application/json")

    return make


def _small_files() -> bytes:
    files = [file.make(_SMALL_SCALE) for file in FILES.values()]
    return post(form_body(files[:_MAX_IMAGES]), FORM)


for _file in FILES.values():
    _register(_file.name, _file.description, _alone(_file))
for _name in ("png-column", "jpeg-arithmetic-sequential", "webp-blank"):
    _register(f"{_name}-form", f"64 times in one form: {FILES[_name].description}", _form(FILES[_name]))
for _name in ("jpeg-without-data", "webp-transforms"):
    _register(f"{_name}-json", f"64 times in one JSON body: {FILES[_name].description}", _json(FILES[_name]))
_register("small-hostile-files", "a form of small versions of all hostile files", _small_files)
