"""Calibrated predictions: probabilities that match how often a model is right, and the rules by which it abstains.

A run stores these settings in `calibration.json`, an artifact in `artifact.json`. Both apply them by this module, so a
model gives the same probabilities and abstains on the same images wherever it runs.

Letters: N images, K classes, C channels of an embedding, M stored training images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from patchloom_runtime.untrusted import check_shape

NONE_OF_THESE = "none of these"
TEMPERATURES = (0.02, 50.0)  # smallest and largest
MOST_STORED = 1 << 20  # training images
MOST_CHANNELS = 1 << 16
MOST_NEIGHBORS = 1_000
_SHAPE = {
    "temperature": float,
    "negatives": list[str],
    "promise": {
        "max_error": float,
        "confidence": float,
        "threshold": float,
        "answers": float,
        "images": int,
    },
    "distance": {"limit": float, "neighbors": int, "rejects": float, "images": int, "stored": list[int]},
}


class ClassScores(list[tuple[str, float]]):
    """(class name, probability) pairs of one image, most likely first.

    `abstained` is the reason why the model does not answer, or "" if it does. The pairs are the same in both cases.
    """

    abstained: str = ""


@dataclass(frozen=True)
class Promise:
    """A confidence threshold and the error rate that is promised above it."""

    max_error: float  # largest share of the answered images that is wrong
    confidence: float  # probability that the promise holds, over the draw of the images it was tested on
    threshold: float  # probability of the best class below which the model does not answer
    answers: float  # share of the tested images that it answers
    images: int  # that the threshold was tested on

    def in_words(self) -> str:
        """Return the promise as a sentence."""
        return (
            f"wrong on at most {100 * self.max_error:g} % of the images it answers "
            f"(with {100 * self.confidence:g} % confidence); answers {100 * self.answers:.1f} % of {self.images:,} "
            "images"
        )


@dataclass(frozen=True)
class DistanceRule:
    """The distance from the training images beyond which an image is rejected."""

    limit: float
    neighbors: int  # the distance is that of this nearest stored image
    rejects: float  # largest share of images like those of val that is rejected
    images: int  # that the limit was chosen on
    stored: tuple[int, int]  # shape (M, C) of the stored vectors

    def distances(self, stored: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """Return 1 − cosine of the k-th nearest of `stored` (M, C), unit vectors, for each of `vectors` (N, C)."""
        unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        similarity = unit.astype(np.float32) @ stored.astype(np.float32).T  # (N, M)
        nearest = np.partition(-similarity, self.neighbors - 1, axis=1)[:, self.neighbors - 1]
        return 1 + nearest


@dataclass(frozen=True)
class Calibration:
    """How logits become probabilities, and when a model abstains."""

    temperature: float = 1.0
    negatives: tuple[str, ...] = ()  # classes that mean none of these
    promise: Promise | None = None
    distance: DistanceRule | None = None

    @property
    def abstains(self) -> bool:
        """Whether the model answers only some images."""
        return bool(self.negatives or self.promise or self.distance)

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return the softmax of logits (N, K) divided by the temperature."""
        scaled = logits.astype(np.float64) / self.temperature
        shares = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        return (shares / shares.sum(axis=1, keepdims=True)).astype(np.float32)

    def answered(
        self, names: Sequence[str], predictions: np.ndarray, confidence: np.ndarray, distances: np.ndarray | None
    ) -> np.ndarray:
        """Return whether the model answers each image, (N,) bool; `distances` is None if they are not known."""
        answered = ~np.isin(predictions, [number for number, name in enumerate(names) if name in self.negatives])
        if self.promise:
            answered &= confidence >= self.promise.threshold
        if self.distance and distances is not None:
            answered &= distances <= self.distance.limit
        return answered

    def reason(self, best: tuple[str, float], distance: float | None = None) -> str:
        """Return why the model abstains on an image with this best class and its probability; "" if it answers."""
        name, probability = best
        if self.distance and distance is not None and distance > self.distance.limit:
            return f"unlike the training images (distance {distance:.3f}, limit {self.distance.limit:.3f})"
        if name in self.negatives:
            return f"most like the negatives ({name} {probability:.1%})"
        if self.promise and probability < self.promise.threshold:
            return f"unsure: best guess {name} {probability:.1%}, below {self.promise.threshold:.1%}"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Calibration":
        """Return what `to_dict` returned. Raises ValueError if a value has the wrong type or is out of range."""
        for name in ("promise", "distance"):
            check_shape(values, {f"{name}?": _SHAPE[name]})
        check_shape(values, {name: _SHAPE[name] for name in ("temperature", "negatives")})
        temperature, negatives = float(values["temperature"]), tuple(values["negatives"])
        if not TEMPERATURES[0] <= temperature <= TEMPERATURES[1]:
            raise ValueError(f"temperature is {temperature}, expected {TEMPERATURES[0]} to {TEMPERATURES[1]}")
        promise = Promise(**_fields(Promise, section)) if (section := values.get("promise")) else None
        distance = None
        if section := values.get("distance"):
            fields = _fields(DistanceRule, section)
            distance = DistanceRule(**fields | {"stored": _stored_shape(fields["stored"], fields["neighbors"])})
        shares = (promise.max_error, promise.confidence, promise.threshold, promise.answers) if promise else ()
        if not all(0 <= share <= 1 for share in shares) or (distance and not 0 <= distance.rejects <= 1):
            raise ValueError("promise or distance has a share that is not between 0 and 1")
        return cls(temperature, negatives, promise, distance)


UNCALIBRATED = Calibration()


@dataclass(frozen=True)
class ReliabilityBin:
    """The images whose confidence lies in one of equal intervals."""

    images: int
    confidence: float  # mean, 0…1
    accuracy: float  # share of right predictions, 0…1


@dataclass(frozen=True)
class Reliability:
    """How well confidence matches accuracy."""

    loss: float  # mean cross-entropy, in nats
    bins: tuple[ReliabilityBin, ...]

    @property
    def calibration_error(self) -> float:
        """Mean gap between confidence and accuracy over the bins, in percent (arXiv 1706.04599)."""
        total = sum(each.images for each in self.bins)
        return 100 * sum(each.images * abs(each.confidence - each.accuracy) for each in self.bins) / max(1, total)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"loss": self.loss, "bins": [[each.images, each.confidence, each.accuracy] for each in self.bins]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Reliability":
        """Return what `to_dict` returned. Raises ValueError if a value has the wrong type or is out of range."""
        check_shape(values, {"loss": float, "bins": list[list[float]]})
        bins = []
        for row in values["bins"]:
            if len(row) != 3 or type(row[0]) is not int or row[0] < 0 or not all(0 <= x <= 1.001 for x in row[1:]):
                raise ValueError(f"a bin is {row[:4]}, expected images, confidence and accuracy")
            bins.append(ReliabilityBin(*row))
        return cls(values["loss"], tuple(bins))


@dataclass(frozen=True)
class TemperatureFit:
    """A temperature, and the cross-entropy of images it was not fitted to, with and without one."""

    fitted: float
    loss_without: float  # nats
    loss_with: float

    @property
    def helps(self) -> bool:
        """Whether a temperature lowers the cross-entropy of images it was not fitted to."""
        return self.loss_with < self.loss_without

    @property
    def temperature(self) -> float:
        """The temperature to use: the fitted one if it helps, else 1."""
        return self.fitted if self.helps else 1.0


def _fields(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in kind.__dataclass_fields__}


def _stored_shape(shape: Sequence[int], neighbors: int) -> tuple[int, int]:
    fits = len(shape) == 2 and 0 < shape[0] <= MOST_STORED and 0 < shape[1] <= MOST_CHANNELS
    if not fits or not 0 < neighbors <= min(MOST_NEIGHBORS, shape[0]):
        raise ValueError(f"distance has stored vectors of shape {list(shape)} and {neighbors} neighbors")
    return shape[0], shape[1]
