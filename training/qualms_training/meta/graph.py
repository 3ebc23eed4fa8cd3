"""The bundle's whole graph as one module, from pixels to class, α and every score."""

from torch import Tensor, nn

from qualms.bundle.manifest import Predictor
from qualms.bundle.scores import FEATURE_SCORES
from qualms_training.meta.dirichlet import DirichletScores, dirichlet_scores
from qualms_training.meta.extractor import Extractor
from qualms_training.meta.ood_scores import OodScores


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
        """The names of the outputs of `forward`, in the order of the ONNX file."""
        joined = () if self.ood_scores is None else FEATURE_SCORES
        return ("prediction", "base_probabilities", *DirichletScores._fields, *joined)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """uint8 (N, H, W, C) to all outputs."""
        logits, taps = self.extractor(image)
        dirichlet = dirichlet_scores(self.meta_model(taps))
        source = logits if self.predicts_by == "base" else dirichlet.alpha
        plain = (source.argmax(dim=-1), logits.softmax(dim=-1), *dirichlet)
        if self.ood_scores is None:
            return plain
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
