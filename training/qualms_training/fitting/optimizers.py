"""The optimiser a recipe names."""

from torch import nn, optim

from qualms_training.recipe import Optimisation


def make_optimizer(model: nn.Module, section: Optimisation) -> optim.Optimizer:
    """Over all of the model's weights; the loop sets the rate of every step."""
    if section.optimizer == "adam":
        return optim.Adam(model.parameters(), lr=section.lr, weight_decay=section.weight_decay)
    return optim.SGD(
        model.parameters(),
        lr=section.lr,
        momentum=section.momentum,
        nesterov=section.nesterov,
        weight_decay=section.weight_decay,
    )
