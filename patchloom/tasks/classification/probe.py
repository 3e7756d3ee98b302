"""`patchloom.probe`: the features of several runs, measured by simple classifiers on the same data."""

from collections.abc import Sequence

from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.data.sources.specs import Data
from patchloom.inference.classifier import load
from patchloom.inference.probes import Probes
from patchloom.tasks.classification.several_runs import Runs, runs_by_name
from patchloom_runtime.errors import with_near_options


@with_near_options
def probe(
    runs: Runs,
    data: Data,
    *,
    knn: Sequence[int] = (20,),
    linear: bool = False,
    linear_sgd: int | None = None,
    few_shot: int | None = None,
    trunk: bool = False,
    device: str = "auto",
    level: str | None = None,
    size: int | None = None,
    crop_ratio: float | None = None,
    strict: bool = False,
    reading: Reading = AS_IT_IS,
    batch: int = 64,
    workers: int = 0,
) -> dict[str, Probes]:
    """Return the probes of each run by its name: classifiers on frozen features, trained on train, evaluated on val.

    knn         numbers of neighbors that vote, such as (10, 20)
    linear      add a linear probe
    linear_sgd  epochs of a linear probe trained with SGD on augmented images, as in DINO
    few_shot    images per class of a linear probe trained on few images
    trunk       use the vectors before the projector of a run that has one
    device      'cpu', 'cuda' …; 'auto' uses a GPU if there is one
    level       label level to compare with; that of the model's classes by default
    size        image size in pixels; the run's by default
    crop_ratio  share of the short side that is kept; the run's by default
    strict      treat stray classes as errors
    reading     how the data are read (`patchloom.Reading`)
    batch       images per batch
    workers     processes that read images
    """
    probes = {}
    for name, folder in runs_by_name(runs).items():
        classifier = load(folder, device=device, trunk=trunk)
        probes[name] = classifier.probe(
            data, knn=knn, linear=linear, linear_sgd=linear_sgd, few_shot=few_shot, size=size, crop_ratio=crop_ratio,
            batch=batch, workers=workers, strict=strict, reading=reading, level=level,
        )  # fmt: skip
    return probes
