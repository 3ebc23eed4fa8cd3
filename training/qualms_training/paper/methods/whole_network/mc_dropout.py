"""MC Dropout (Gal & Ghahramani, "Dropout as a Bayesian Approximation: Representing Model Uncertainty in Deep
Learning", ICML 2016)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from qualms.bundle.manifest import Fraction
from qualms_training.meta.taps import open_head
from qualms_training.paper.material import Pictures, Shown
from qualms_training.paper.method import NotApplicableError, OnImages, Verdict
from qualms_training.paper.methods.whole_network.networks import (
    batches,
    example_for,
    new_network,
    section_for,
    train_network,
)
from qualms_training.recipe import Count


@dataclass
class MCDropout(OnImages):
    """The base's architecture trained with dropout, which stays on while the passes over an image are averaged.

    A network's own dropout is used where it has some; otherwise there is one in front of each linear layer.
    """

    samples: Count = 20
    """T: passes over each image"""
    dropout: Fraction = 0.5
    """probability of dropping a unit, where the network has no dropout of its own"""
    epochs: Count | None = None
    """of training; None takes as many as the base"""

    def fit(self, pictures: Pictures) -> int:
        """Train as the base is trained."""
        self.model = with_dropout(new_network(pictures), self.dropout, example_for(pictures))
        self.seed, self.device = pictures.seed, pictures.device
        return train_network(pictures, self.model, section_for(pictures, self.epochs))

    @torch.inference_mode()
    def score(self, shown: Shown) -> Verdict:
        """Class of the mean probabilities; their entropy, and the mutual information with the network drawn."""
        _drop_at_test(self.model.to(self.device))
        certain, drawn = self.model
        parts = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)  # dropout draws from the global generator
            for batch in batches(shown, self.device):
                features = certain(batch)
                logits = torch.stack([drawn(features) for _ in range(self.samples)])
                parts.append(logits.double().log_softmax(dim=-1).cpu())
        found = [sampled(logs) for logs in parts]
        predictions, entropy, information = (torch.cat(column).numpy() for column in zip(*found, strict=True))
        return Verdict(predictions.astype(np.int64), {"entropy": entropy, "mutual_information": information})


def sampled(logs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities (T, N, K) to class, entropy of the mean, and that less the mean entropy, (N,) each."""
    p = logs.exp()
    mean = p.mean(dim=0)
    entropy = -torch.special.xlogy(mean, mean).sum(dim=-1)
    # A logarithm stays finite where its probability underflows to 0, so that no product is NaN.
    expected = -(p * logs).sum(dim=-1).mean(dim=0)
    return mean.argmax(dim=-1), entropy, entropy - expected


def with_dropout(model: nn.Module, probability: float, example: Tensor) -> nn.Sequential:
    """`model` in two parts, so that passes over an image need not repeat the first, which drops nothing.

    A model that drops something is left as it is; another gets dropout in front of each of its linear layers.
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


def _drop_at_test(model: nn.Module) -> None:
    """Evaluation mode, in which batch normalisation is fixed, with dropout on."""
    model.eval()
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.train()
