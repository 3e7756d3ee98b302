"""Base of networks with an optional distillation token, whose classifier follows a teacher (thesis 3.3).

Paper and code: the authors' code averages the logits of the two classifiers (`fusion="logits"`, the default); the text
adds their softmaxes (`fusion="softmax"`, returned as log-probabilities).
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from patchloom.models.network import Network, NetworkConfig
from patchloom_runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class DistilledConfig(NetworkConfig):
    """Options of the distillation token."""

    distilled: bool = False
    fusion: Literal["logits", "softmax", "class", "distillation"] = "logits"


class DistilledNetwork(Network):
    """A network whose features start with a class token and, if `distilled`, a distillation token."""

    config: DistilledConfig
    distillation_classifier: nn.Module

    @property
    def class_token_count(self) -> int:
        """Number of class and distillation tokens."""
        return 2 if self.config.distilled else 1

    @property
    def has_distillation_token(self) -> bool:
        return self.config.distilled

    def classifiers(self) -> dict[str, int]:
        names = ["classifier", "distillation_classifier"] if self.config.distilled else ["classifier"]
        return dict.fromkeys(names, self.feature_dim)

    def class_token_path(self, images: Tensor) -> list[Tensor]:
        """Return tokens (B or 1, T+…, C), class tokens first: as learned, then after every block that changes them."""
        raise UsageError(f"{self.config.name} does not define class_token_path for {tuple(images.shape)} images")

    def pool(self, features: Tensor) -> Tensor:
        """(B, T+N, C) → class token (B, C), or the mean of class and distillation token."""
        return features[:, :2].mean(dim=1) if self.config.distilled else features[:, 0]

    def both_heads(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Features → logits of the class token and of the distillation token."""
        if not self.config.distilled:
            return super().both_heads(features)
        return self.classifier(features[:, 0]), self.distillation_classifier(features[:, 1])

    def head(self, features: Tensor) -> Tensor:
        """Features → logits (B, classes). The two heads are fused as `fusion` says."""
        if not self.config.distilled or self.config.num_classes == 0:
            return self.classifier(self.pool(features))
        class_logits, distillation_logits = self.both_heads(features)
        match self.config.fusion:
            case "class":
                return class_logits
            case "distillation":
                return distillation_logits
            case "softmax":
                return ((class_logits.softmax(dim=-1) + distillation_logits.softmax(dim=-1)) / 2).log()
        return (class_logits + distillation_logits) / 2

    def forward(self, images: Tensor, *, both_heads: bool = False) -> Any:
        """(B, 3, H, W) → logits (B, classes), or with `both_heads` those of both heads, for training."""
        features = self.features(images)
        return self.both_heads(features) if both_heads else self.head(features)
