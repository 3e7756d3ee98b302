"""The evaluation methods of `Classifier`: evaluate, probe and sweep."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

from patchloom.data.datasets import Progress
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom_runtime.errors import with_near_options

# Imported where they are used: predicting does not need them.
if TYPE_CHECKING:
    from patchloom.data.sources.specs import Data
    from patchloom.inference.classifier import Classifier
    from patchloom.inference.evaluations import Evaluation, SweepPoint
    from patchloom.inference.probes import Probes


class EvaluationMethods:
    """A base class of `Classifier`."""

    @with_near_options
    def evaluate(
        self,
        data: "Data",
        *,
        split: str | None = None,
        size: int | None = None,
        crop_ratio: float | None = None,
        real: str | None = None,
        v2: bool = False,
        batch: int = 64,
        workers: int = 0,
        strict: bool = False,
        reading: Reading = AS_IT_IS,
        level: str | None = None,
        progress: Progress | None = None,
    ) -> "Evaluation":
        """Evaluate the classifier on a dataset with its classes, matched by name.

        split       train, val, test or all (default: val, else the images the run held out, else all)
        size        image size in pixels (default: the model's)
        crop_ratio  share of the short side that is cropped (default: the model's)
        real        path of the ImageNet-ReaL labels
        v2          folder names are class numbers, as in ImageNet-V2
        batch       images per batch
        workers     processes that read images
        strict      raise an error for classes that the model does not know, instead of adding a note
        reading     how to read the data (`patchloom.Reading`; default: as in training)
        level       label level to compare with (default: that of the model's classes)
        progress    called with the number of images done and their total
        """
        options = locals()
        from patchloom.inference.evaluations import EvaluationSettings, evaluate_on

        classifier, settings = cast("Classifier", self), EvaluationSettings.of(options)
        classifier.check_decides()
        return evaluate_on(classifier, settings.open(data, classifier), settings)

    @with_near_options
    def probe(
        self,
        data: "Data",
        *,
        knn: Sequence[int] = (),
        linear: bool = False,
        linear_sgd: int | None = None,
        few_shot: int | None = None,
        size: int | None = None,
        crop_ratio: float | None = None,
        batch: int = 64,
        workers: int = 0,
        strict: bool = False,
        reading: Reading = AS_IT_IS,
        level: str | None = None,
    ) -> "Probes":
        """Evaluate the features on any dataset with probes that are fitted to its train split and tested on val.

        The model's own head is not used. Options that are not listed are those of `evaluate`.

        knn         numbers of neighbors for a k-NN classifier, such as (10, 20)
        linear      fit a linear probe
        linear_sgd  epochs of DINO's linear evaluation: SGD on augmented images
        few_shot    images per class for a few-shot probe
        """
        options = locals()
        from patchloom.inference.evaluations import EvaluationSettings
        from patchloom.inference.probes import ProbeSettings, probe_on

        probes = ProbeSettings(neighbors=tuple(knn), linear=linear, linear_sgd=linear_sgd, few_shot=few_shot)
        return probe_on(cast("Classifier", self), data, EvaluationSettings.of(options), probes)

    @with_near_options
    def sweep(
        self,
        data: "Data",
        over: Literal["crop", "size"],
        values: Sequence[float] | None = None,
        *,
        split: str | None = None,
        size: int | None = None,
        crop_ratio: float | None = None,
        real: str | None = None,
        v2: bool = False,
        batch: int = 64,
        workers: int = 0,
        strict: bool = False,
        reading: Reading = AS_IT_IS,
        level: str | None = None,
        progress: Progress | None = None,
    ) -> "list[SweepPoint]":
        """Evaluate the classifier at several crop ratios or image sizes (default: common values).

        The options are those of `evaluate`.
        """
        options = locals()
        from patchloom.inference.evaluations import EvaluationSettings, sweep_on

        return sweep_on(cast("Classifier", self), data, EvaluationSettings.of(options), over=over, values=values)
