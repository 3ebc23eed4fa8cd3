"""Where the Hugging Face Hub cannot be reached, models come from its cache or are refused at once."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qualms_training.errors import ModelError
from qualms_training.models.libraries.hub import hub_or_cache
from qualms_training.models.libraries.torchvision_compat import import_torchvision
from qualms_training.models.source import load_base, untrained_base

REFUSED = r"127\.0\.0\.1 cannot be reached: Connection refused"
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@pytest.fixture
def constants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The settings of the Hub's client, with an empty cache and no proxies."""
    import_torchvision()
    pytest.importorskip("timm")
    settings: ModuleType = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(settings, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(settings, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return settings


@pytest.fixture
def unreachable(constants: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The settings with an address at which nothing listens."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    return constants


@pytest.fixture
def listening(constants: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The settings with an address at which a server accepts connections."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield constants


@pytest.mark.parametrize("spec", ["hf_hub:org/name", "timm:hf_hub:org/name", "timm:resnet10t.c3_in1k"])
def test_timm_weights_are_refused_with_the_host(spec: str, unreachable: ModuleType) -> None:
    with pytest.raises(ModelError, match=rf"The weights of .* cannot be loaded \({REFUSED}\); without a network, "):
        load_base(spec)
    assert unreachable.HF_HUB_OFFLINE is False


def test_timm_configurations_are_refused_with_the_host(unreachable: ModuleType) -> None:
    with pytest.raises(ModelError, match=rf"The configuration of 'timm:hf_hub:org/name' cannot be loaded \({REFUSED}"):
        untrained_base("hf_hub:org/name")


@pytest.mark.parametrize("load", [load_base, untrained_base])
def test_hugging_face_models_are_refused_with_the_host(load: Any, unreachable: ModuleType) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ModelError, match=rf"Model 'transformers:org/name' cannot be loaded \({REFUSED}"):
        load("transformers:org/name")


def test_cached_models_need_no_hub(unreachable: ModuleType, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "hub" / "models--org--name"
    snapshot = folder / "snapshots" / "a1"
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8
    )
    transformers.ViTForImageClassification(config).save_pretrained(snapshot)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a1")
    assert load_base("transformers:org/name").weights_source == "those of 'org/name'"


def test_the_hub_is_asked_if_it_can_be_reached(listening: ModuleType) -> None:
    with hub_or_cache() as reason:
        assert reason is None
        assert listening.HF_HUB_OFFLINE is False


def test_proxies_are_left_to_the_client_of_the_hub(unreachable: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with hub_or_cache() as reason:
        assert reason is None
