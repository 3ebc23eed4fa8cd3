"""The bundle's whole graph as one module: pixels in; class, α and every score out."""

from typing import Literal, NamedTuple

from torch import Tensor, nn

from qualms.bundle.scores import FEATURE_SCORES
from qualms_training.fitting.feature_cache import Extractor
from qualms_training.meta.dirichlet import scores
from qualms_training.meta.ood_scores import OodScores


class GraphOutputs(NamedTuple):
    """What every bundle puts out, in the order and by the names of the ONNX file."""

    prediction: Tensor
    """(N,) int64"""
    base_probabilities: Tensor
    """(N, K) softmax of the frozen base"""
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
    """Frozen base, taps, meta-model, Dirichlet scores and, with a doubter, distance and fused score; export this."""

    def __init__(
        self,
        extractor: Extractor,
        meta: nn.Module,
        prediction: Literal["base", "meta"] = "base",
        doubter: OodScores | None = None,
    ) -> None:
        super().__init__()
        self.extractor = extractor
        self.meta_model = meta  # `meta` is taken: torch.export keeps its own attribute of that name
        self.predicts_by = prediction
        self.doubter = doubter

    @property
    def outputs(self) -> tuple[str, ...]:
        """What `forward` returns, by name."""
        return GraphOutputs._fields + (() if self.doubter is None else FEATURE_SCORES)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """uint8 (N, H, W, C) to all outputs."""
        logits, taps = self.extractor(image)
        found = scores(self.meta_model(taps))
        source = logits if self.predicts_by == "base" else found.alpha
        plain = GraphOutputs(
            prediction=source.argmax(dim=-1),
            base_probabilities=logits.softmax(dim=-1),
            **found._asdict(),
        )
        if self.doubter is None:
            return tuple(plain)
        return (*plain, *self.doubter(logits, found.mutual_information, taps))

    def named(self, image: Tensor) -> dict[str, Tensor]:
        """The same by name."""
        return dict(zip(self.outputs, self(image), strict=True))


class BaseGraph(nn.Module):
    """The frozen base alone, from the same pixels: what the scores' cost is measured against."""

    def __init__(self, extractor: Extractor) -> None:
        super().__init__()
        self.normalise = extractor.normalise
        self.base = extractor.tapped.base

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 (N, H, W, C) to prediction (N,) and base_probabilities (N, K)."""
        logits = self.base(self.normalise(image))
        return logits.argmax(dim=-1), logits.softmax(dim=-1)
