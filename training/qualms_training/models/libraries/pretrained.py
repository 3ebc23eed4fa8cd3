"""Models of torchvision and timm with the weights that these libraries publish."""

import importlib
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import nn

from qualms.errors import first_line
from qualms_training.errors import ModelError, did_you_mean
from qualms_training.models.libraries.external import check_timm_name, import_timm, torchvision_models
from qualms_training.models.libraries.hub import HUB, hub_failure, hub_or_cache

DEFAULT = "DEFAULT"


def torchvision_weights(name: str, weights: str) -> Any:
    """The member `weights` of a torchvision classifier's weights enum."""
    members = torchvision_models(name).get_model_weights(name).__members__
    if weights not in members:
        raise ModelError(
            f"Weights {weights!r} are neither a file nor weights of 'torchvision:{name}', which has "
            f"{', '.join(members)}{did_you_mean(weights, members)}"
        )
    return members[weights]


def torchvision_with_weights(name: str, weights: Any) -> nn.Module:
    """A torchvision classifier with weights that torchvision downloads unless they are in its cache."""
    try:
        model: nn.Module = torchvision_models(name).get_model(name, weights=weights)
    except OSError as error:  # URLError and HTTPError too
        file, folder = Path(urlparse(weights.url).path).name, Path(torch.hub.get_dir()) / "checkpoints"
        raise ModelError(
            f"The weights {weights.name} of 'torchvision:{name}' cannot be downloaded ({first_line(error)}); put {file} from "
            f"{weights.url} into {folder}, or give it with --weights {file}."
        ) from error
    return model


def timm_with_weights(name: str) -> nn.Module:
    """A timm classifier with its published weights; `name` may have a tag, or be `hf_hub:ORGANISATION/NAME`."""
    timm = import_timm(f"timm:{name}")
    check_timm_name(timm, name)
    with hub_or_cache() as unreachable:
        try:
            model: nn.Module = timm.create_model(name, pretrained=True)
        except Exception as error:  # several download libraries, each with exceptions of its own
            raise ModelError(
                f"The weights of 'timm:{name}' cannot be loaded ({hub_failure(error, unreachable)}); {_timm_file(timm, name)}"
            ) from error
    return model


def _timm_file(timm: Any, name: str) -> str:
    """The end of a sentence: the file to bring where there is no network."""
    cache = importlib.import_module("huggingface_hub.constants").HF_HUB_CACHE
    if name.startswith(HUB):
        repository = name.partition(":")[2]
        return (
            f"without a network, model.safetensors and config.json of https://huggingface.co/{repository} must be in the "
            f"cache {cache}, or give the architecture as timm:NAME and the file with --weights model.safetensors."
        )
    config = timm.models.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        return "timm has none for it: give a file with --weights FILE."
    if config.hf_hub_id:
        repository = config.hf_hub_id if config.hf_hub_id != "timm/" else f"timm/{config.architecture}.{config.tag}"
        where = f"model.safetensors of https://huggingface.co/{repository} (cache: {cache})"
    else:
        where = f"{config.url} (cache: {torch.hub.get_dir()}/checkpoints)"
    return f"without a network, bring {where} and give it with --weights FILE."
