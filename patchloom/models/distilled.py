"""Networks that may have a second token, which follows a teacher with a classifier of its own (thesis 3.3).

Paper and code: the two classifiers are fused by averaging logits in the authors' code (`fusion="logits"`, the default);
the text adds their softmaxes (`fusion="softmax"`, returned as log-probabilities).
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from patchloom.models.network import Network, NetworkConfig
from patchloom_runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class DistilledConfig(NetworkConfig):
    """Options of the second token."""

    distilled: bool = False
    fusion: Literal["logits", "softmax", "class", "distillation"] = "logits"


class DistilledNetwork(Network):
    """Features with class tokens first: one, or with `distilled` one for the labels and one for the teacher."""

    config: DistilledConfig
    distillation_classifier: nn.Module

    @property
    def class_token_count(self) -> int:
        """How many tokens do not come from the image."""
        return 2 if self.config.distilled else 1

    @property
    def has_distillation_token(self) -> bool:
        """As the config says."""
        return self.config.distilled

    def classifiers(self) -> dict[str, int]:
        """One classifier, and a second for the distillation token."""
        names = ["classifier", "distillation_classifier"] if self.config.distilled else ["classifier"]
        return dict.fromkeys(names, self.feature_dim)

    def class_token_path(self, images: Tensor) -> list[Tensor]:
        """Tokens (B or 1, T+…, C), class tokens first: as learned, then after every block that changes them."""
        raise UsageError(f"{self.config.name} does not say how its tokens change for {tuple(images.shape)} images")

    def pool(self, features: Tensor) -> Tensor:
        """The class token; a distilled network averages its two tokens."""
        return features[:, :2].mean(dim=1) if self.config.distilled else features[:, 0]

    def both_heads(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the class token and of the distillation token of a distilled network."""
        if not self.config.distilled:
            return super().both_heads(features)
        return self.classifier(features[:, 0]), self.distillation_classifier(features[:, 1])

    def head(self, features: Tensor) -> Tensor:
        """Logits (B, classes); of a distilled network, its heads fused as the config says."""
        if not self.config.distilled or self.config.num_classes == 0:
            return self.classifier(self.pool(features))
        of_class, of_teacher = self.both_heads(features)
        match self.config.fusion:
            case "class":
                return of_class
            case "distillation":
                return of_teacher
            case "softmax":
                return ((of_class.softmax(dim=-1) + of_teacher.softmax(dim=-1)) / 2).log()
        return (of_class + of_teacher) / 2

    def forward(self, images: Tensor, *, both_heads: bool = False) -> Any:
        """(B, 3, H, W) → logits (B, classes), or with `both_heads` the pair that a distilled network trains."""
        features = self.features(images)
        return self.both_heads(features) if both_heads else self.head(features)
