"""Models by name; every module of our own models runs exactly once, so any of them can be a tap."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from qualms_training.errors import ModelError
from qualms_training.models import NAMES, build, identity


@pytest.mark.parametrize("name", NAMES)
def test_every_module_of_our_models_runs_exactly_once(name: str) -> None:
    net = build(name, 4, channels=1).eval()
    runs: Counter[str] = Counter()
    for module_name, module in net.named_modules():
        module.register_forward_hook(lambda *_, seen=module_name: runs.update([seen]))
    with torch.no_grad():
        assert net(torch.zeros(2, 1, 32, 32)).shape == (2, 4)
    assert runs == Counter(module_name for module_name, _ in net.named_modules())


def test_build_loads_given_weights(tmp_path: Path) -> None:
    source = build("small", 4, height=16, width=16)
    torch.save(source.state_dict(), tmp_path / "base.pth")
    again = build("small", 4, height=16, width=16, weights=tmp_path / "base.pth")
    assert identity(again) == identity(source)


@pytest.mark.parametrize("spec", ["lenett", "", "lenet:", ":lenet", "resnet-20"])
def test_the_error_for_an_unknown_name_lists_what_is_accepted(spec: str) -> None:
    accepted = "torchvision:NAME, timm:NAME, package.module:function)"
    with pytest.raises(ModelError, match=f"Model {re.escape(repr(spec))} is not known .*") as caught:
        build(spec, 4)
    assert accepted in str(caught.value)


def test_a_similar_name_is_suggested() -> None:
    with pytest.raises(ModelError, match="; did you mean 'resnet20'"):
        build("resnet-20", 4)
