"""The bundle's whole graph as one module, from pixels to class, α and every score."""

from typing import NamedTuple

from torch import Tensor, nn

from qualms.bundle.manifest import Predictor
from qualms.bundle.scores import FEATURE_SCORES
from qualms_training.meta.dirichlet import scores
from qualms_training.meta.extractor import Extractor
from qualms_training.meta.ood_scores import OodScores


class GraphOutputs(NamedTuple):
    """The outputs of every bundle, in the order and with the names of the ONNX file."""

    prediction: Tensor
    """(N,) int64"""
    base_probabilities: Tensor
    """(N, K), softmax of the frozen base"""
    probabilities: Tensor
    alpha: Tensor
    entropy: Tensor
    max_probability: Tensor
    mutual_information: Tensor
    differential_entropy: Tensor
    precision: Tensor
    log_precision: Tensor
    expected_entropy: Tensor
    error_probability: Tensor


class BundleGraph(nn.Module):
    """Frozen base, taps, meta-model, Dirichlet scores and, with `ood_scores`, distance and fused score: the exported module."""

    def __init__(
        self,
        extractor: Extractor,
        meta: nn.Module,
        prediction: Predictor = "base",
        ood_scores: OodScores | None = None,
    ) -> None:
        super().__init__()
        self.extractor = extractor
        self.meta_model = meta  # torch.export uses the attribute name `meta` itself
        self.predicts_by = prediction
        self.ood_scores = ood_scores

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs of `forward`."""
        return GraphOutputs._fields + (() if self.ood_scores is None else FEATURE_SCORES)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """uint8 (N, H, W, C) to all outputs."""
        logits, taps = self.extractor(image)
        dirichlet = scores(self.meta_model(taps))
        source = logits if self.predicts_by == "base" else dirichlet.alpha
        plain = GraphOutputs(
            prediction=source.argmax(dim=-1),
            base_probabilities=logits.softmax(dim=-1),
            **dirichlet._asdict(),
        )
        if self.ood_scores is None:
            return tuple(plain)
        return (*plain, *self.ood_scores(logits, dirichlet.mutual_information, taps))

    def named(self, image: Tensor) -> dict[str, Tensor]:
        """The outputs by name."""
        return dict(zip(self.outputs, self(image), strict=True))


class BaseGraph(nn.Module):
    """The frozen base alone, from the same pixels: the reference for the cost of the scores."""

    def __init__(self, extractor: Extractor) -> None:
        super().__init__()
        self.normalise = extractor.normalise
        self.base = extractor.tapped.base

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 (N, H, W, C) to prediction (N,) and base_probabilities (N, K)."""
        logits = self.base(self.normalise(image))
        return logits.argmax(dim=-1), logits.softmax(dim=-1)
