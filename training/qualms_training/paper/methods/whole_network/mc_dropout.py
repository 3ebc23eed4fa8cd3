"""MC Dropout (Gal & Ghahramani, "Dropout as a Bayesian Approximation: Representing Model Uncertainty in Deep
Learning", ICML 2016)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from qualms.bundle.parts import Fraction
from qualms_training.meta.taps.tapped import open_head
from qualms_training.paper.inputs import ImageInputs, Images
from qualms_training.paper.method import ImageMethod, MethodOutput, NotApplicableError
from qualms_training.paper.methods.whole_network.training import (
    batches,
    example_for,
    new_network,
    section_for,
    train_network,
)
from qualms_training.recipe import Count


@dataclass
class MCDropout(ImageMethod):
    """The base's architecture trained with dropout; scores average several passes in which dropout is active.

    If the network has no dropout layers, one is inserted before each linear layer.
    """

    samples: Count = 20
    """T: passes over each image"""
    dropout: Fraction = 0.5
    """probability of dropping a unit, if the network has no dropout layers of its own"""
    epochs: Count | None = None
    """epochs of training; None uses as many as the base"""

    def fit(self, inputs: ImageInputs) -> int:
        """Train with the base's settings."""
        self.model = with_dropout(new_network(inputs), self.dropout, example_for(inputs))
        self.seed, self.device = inputs.seed, inputs.device
        return train_network(inputs, self.model, section_for(inputs, self.epochs))

    @torch.inference_mode()
    def score(self, images: Images) -> MethodOutput:
        """The class and entropy of the mean probabilities, and the mutual information between class and weights."""
        enable_dropout(self.model.to(self.device))
        deterministic, random = self.model
        parts = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)  # dropout uses the global generator
            for batch in batches(images, self.device):
                features = deterministic(batch)
                logits = torch.stack([random(features) for _ in range(self.samples)])
                parts.append(logits.double().log_softmax(dim=-1).cpu())
        values = [sample_scores(logs) for logs in parts]
        predictions, entropy, information = (torch.cat(column).numpy() for column in zip(*values, strict=True))
        return MethodOutput(predictions.astype(np.int64), {"entropy": entropy, "mutual_information": information})


def sample_scores(logs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities (T, N, K) to class, entropy of the mean, and mutual information, (N,) each.

    The mutual information is the entropy of the mean minus the mean entropy.
    """
    p = logs.exp()
    mean = p.mean(dim=0)
    entropy = -torch.special.xlogy(mean, mean).sum(dim=-1)
    # The logarithms stay finite where a probability underflows to 0, so that no product is NaN.
    expected = -(p * logs).sum(dim=-1).mean(dim=0)
    return mean.argmax(dim=-1), entropy, entropy - expected


def with_dropout(model: nn.Module, probability: float, example: Tensor) -> nn.Sequential:
    """Split `model` into a deterministic part, which runs once per image, and a part with dropout.

    A model that has dropout is not changed; otherwise a dropout layer is inserted before each linear layer.
    """
    if any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules()):
        return nn.Sequential(nn.Identity(), model)
    layers = [(name, module) for name, module in model.named_modules() if name and isinstance(module, nn.Linear)]
    if not layers:
        raise NotApplicableError("the network has neither dropout nor a linear layer to put it in front of")
    if len(layers) == 1:
        opened, tap, layer = open_head(model, example)
        opened.set_submodule(tap.removesuffix(".0"), nn.Identity())
        return nn.Sequential(opened, nn.Sequential(nn.Dropout(probability), layer))
    for name, layer in layers:
        model.set_submodule(name, nn.Sequential(nn.Dropout(probability), layer))
    return nn.Sequential(nn.Identity(), model)


def enable_dropout(model: nn.Module) -> None:
    """Set evaluation mode, with fixed batch normalisation, but with active dropout."""
    model.eval()
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.train()
