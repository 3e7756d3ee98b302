"""The settings of evaluations, and the evaluation methods of `Classifier`: evaluate, probe and sweep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast

from patchloom.data.datasets import Progress
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.options import keywords_of
from patchloom_runtime.errors import UsageError, at_least, with_near_options

# Imported where they are used: predicting does not need them.
if TYPE_CHECKING:
    from patchloom.data.sources.specs import Data
    from patchloom.inference.classifier import Classifier
    from patchloom.inference.evaluations import Evaluation, SweepPoint
    from patchloom.inference.probes import Probes
    from patchloom.models.network import Network


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Which images a model is evaluated on, and how they are read and preprocessed."""

    split: str | None = None  # train, val, test or all; None: val, else the images the run held out, else all
    size: int | None = None  # pixels; None: the model's
    crop_ratio: float | None = None
    real: str | None = None  # path of the ImageNet-ReaL labels
    v2: bool = False  # folder names are class numbers, as in ImageNet-V2
    batch: int = 64
    workers: int = 0
    strict: bool = False
    reading: Reading = AS_IT_IS
    level: str | None = None  # label level to compare with; None: that of the model's classes
    tta: bool = False  # average the probabilities of an image and its mirror image
    progress: Progress | None = None  # called with the number of images done and their total

    def __post_init__(self) -> None:
        check_view_settings(self.size, self.crop_ratio, self.batch)
        at_least("workers", self.workers, 0)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "EvaluationSettings":
        """Return the settings among the arguments of a function (its `locals()`); other arguments are ignored."""
        return cls(**{name: value for name, value in arguments.items() if name in cls.__dataclass_fields__})

    def network(self, classifier: "Classifier") -> "Network":
        """Return the classifier's network at the image size of these settings."""
        return classifier.model if self.size is None else classifier.model.for_images_of(self.size)


class ViewKeywords(TypedDict, total=False):
    """Fields of `EvaluationSettings` that apply to features at every level of the labels."""

    size: int | None
    crop_ratio: float | None
    batch: int
    workers: int
    strict: bool
    reading: Reading


class ProbeKeywords(ViewKeywords, total=False):
    """Fields of `EvaluationSettings` that apply to probes, which need train and val."""

    level: str | None


class EvaluationKeywords(ProbeKeywords, total=False):
    """Fields of `EvaluationSettings`, as keywords."""

    split: str | None
    real: str | None
    v2: bool
    tta: bool
    progress: Progress | None


NOT_OF_PROBES = ("split", "real", "v2", "tta", "progress")


def check_view_settings(size: int | None, crop_ratio: float | None, batch: int) -> None:
    """Raise UsageError if the image size, the crop ratio or the batch size is out of range."""
    if size is not None:
        at_least("size", size, 1)
    at_least("batch", batch, 1)
    if crop_ratio is not None and not 0 < crop_ratio <= 1:
        raise UsageError(f"crop_ratio is {crop_ratio}, expected a share above 0 and up to 1")


class EvaluationMethods:
    """A base class of `Classifier`."""

    @with_near_options
    @keywords_of(EvaluationSettings)
    def evaluate(self, data: "Data", **options: Unpack[EvaluationKeywords]) -> "Evaluation":
        """Evaluate the classifier on a dataset with its classes, matched by name.

        The options are those of `patchloom.evaluate`.
        """
        from patchloom.inference.evaluations import EvaluationData, evaluate_on

        classifier, settings = cast("Classifier", self), EvaluationSettings(**options)
        classifier.check_decides()
        images = EvaluationData(data, settings, [classifier.folder]).open(classifier)
        return evaluate_on(classifier, images, settings)

    @with_near_options
    @keywords_of(EvaluationSettings, omit=NOT_OF_PROBES)
    def probe(
        self,
        data: "Data",
        *,
        knn: Sequence[int] = (),
        linear: bool = False,
        linear_sgd: int | None = None,
        few_shot: int | None = None,
        **options: Unpack[ProbeKeywords],
    ) -> "Probes":
        """Evaluate the features on any dataset with probes that are fitted to its train split and tested on val.

        The model's own head is not used. The options are those of `patchloom.probe`.
        """
        from patchloom.inference.probes import ProbeSettings, probe_on

        probes = ProbeSettings(neighbors=tuple(knn), linear=linear, linear_sgd=linear_sgd, few_shot=few_shot)
        return probe_on(cast("Classifier", self), data, EvaluationSettings(**options), probes)

    @with_near_options
    @keywords_of(EvaluationSettings)
    def sweep(
        self,
        data: "Data",
        over: Literal["crop", "size"],
        values: Sequence[float] | None = None,
        **options: Unpack[EvaluationKeywords],
    ) -> "list[SweepPoint]":
        """Evaluate the classifier at several crop ratios or image sizes (default: common values).

        The options are those of `evaluate`.
        """
        from patchloom.inference.evaluations import sweep_on

        return sweep_on(cast("Classifier", self), data, EvaluationSettings(**options), over=over, values=values)
