"""The bundle's whole graph as one module, from pixels to class, α and every score."""

from torch import Tensor, nn

from qualms.bundle.manifest import Predictor
from qualms_training.meta.dirichlet import DirichletScores, joined_scores
from qualms_training.meta.extractor import Extractor
from qualms_training.meta.flag_score import FlagScore, predicted
from qualms_training.meta.joined_alpha import JoinedAlpha
from qualms_training.meta.meta_model import MetaModel


class BundleGraph(nn.Module):
    """Frozen base, taps, meta-model, flag score, joined α and its scores: the exported module."""

    def __init__(
        self,
        extractor: Extractor,
        meta: MetaModel,
        flag_score: FlagScore,
        joined_alpha: JoinedAlpha,
        prediction: Predictor = "base",
    ) -> None:
        super().__init__()
        self.extractor = extractor
        self.meta_model = meta.folded()  # torch.export uses the attribute name `meta` itself
        self.flag_score = flag_score.folded()
        self.joined_alpha = joined_alpha
        self.predicts_by = prediction

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs of `forward`, in the order of the ONNX file."""
        distance = () if self.flag_score.density is None else ("distance",)
        return (
            *("prediction", "base_probabilities", *DirichletScores._fields),
            *("predicted_error", "meta_mutual_information", *distance, "fused", "fused_terms", "meta_alpha"),
        )

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """uint8 (N, H, W, C) to all outputs."""
        logits, taps = self.extractor(image)
        log_alpha = self.meta_model(taps).double()
        meta_alpha = log_alpha.exp()
        meta_precision = meta_alpha.sum(dim=-1, keepdim=True)
        source = logits.double() if self.predicts_by == "base" else log_alpha
        prediction = predicted(source)
        distance, terms, fused = self.flag_score(prediction, meta_precision, taps)
        alpha, total = self.joined_alpha(source, fused)
        dirichlet, meta_information = joined_scores(alpha, total, meta_alpha, meta_precision, prediction.is_top)
        base = prediction.probabilities.float() if self.predicts_by == "base" else logits.softmax(dim=-1)
        return (
            *(prediction.top.squeeze(1), base, *dirichlet, prediction.error.squeeze(1).float(), meta_information),
            *(() if distance is None else (distance.squeeze(1),)),
            *(fused.squeeze(1).float(), terms.float(), meta_alpha.float()),
        )

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
