"""What tasks with several values per image (labels, numbers) share: data, evaluation of runs, and images of pages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from markupsafe import Markup
from PIL import Image

from patchloom.data.batches.decoded_dataset import make_evaluation_loader
from patchloom.data.datasets import ClassTable, ImageSet, LabeledImages, Source
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.data.sources.source import find_source, match_source
from patchloom.models.network import Network
from patchloom.report.pictures.look import looks, network_inputs
from patchloom.report.pictures.sheets import displayed
from patchloom.report.sections import gallery_section
from patchloom.runs.predictions import ValReport, fingerprint
from patchloom.runs.run_metadata import data_path, is_same_data, read_run_metadata
from patchloom.tasks.report import ReportSettings
from patchloom.tasks.task import ModelLoader
from patchloom_runtime.artifacts.artifact import is_artifact
from patchloom_runtime.errors import DataError, UsageError, attempted

BATCH = 64
SIDE = 168  # pixels of an image in a gallery
R = TypeVar("R")


@dataclass(frozen=True)
class TargetVectors(Generic[R]):
    """How the runs of a task are evaluated; `R` is its report."""

    what: str  # plural name of the values, such as "labels"
    kept: str  # name of what runs keep of val
    with_targets: Callable[[Source], Source]
    evaluate: Callable[..., R]  # of a model, batches, and its mean and standard deviation of pixels
    read_val: Callable[[Path], ValReport[R]]
    names: Callable[[R], Sequence[str]]

    def open(
        self, data: str, names: Sequence[str], *, split: str | None, folder: Path | None, reading: Reading = AS_IT_IS
    ) -> LabeledImages:
        """Open the images of a split with their targets, matched by name with those of a model.

        Without a split, these are val, or the images that the run in `folder` held out of these data, or else all.
        """
        metadata = read_run_metadata(folder) if folder is not None else None
        is_own = metadata is not None and is_same_data(data, metadata.data)
        if metadata is not None and is_own:
            reading = reading.filled_from(metadata.reading)
        source = self.with_targets(find_source(data, reading=reading))
        if split is None and is_own and source.val is None and not source.is_part:
            split = "val"
        images = match_source(source, ClassTable(tuple(names)), split=split)
        return replace(images, notes=tuple(dict.fromkeys(images.notes)))

    def evaluate_on(self, model: Any, images: LabeledImages) -> tuple[ValReport[R], list[str]]:
        """Evaluate a model on images with its targets; return notes on images that cannot be read."""
        own = model.preprocessing
        loader = make_evaluation_loader(
            images,
            own.image_size,
            own.crop_ratio,
            own.interpolation,
            own.resize,
            batch_size=BATCH,
            device=model.device,
            workers=0,
        )
        report = self.evaluate(model, loader.epoch(0), pixel_mean=own.mean, pixel_std=own.std)
        broken = loader.broken
        reason = f"images cannot be read and do not count: {next(iter(broken.values()))}" if broken else ""
        return ValReport(report, fingerprint(images)), [f"{len(broken)} {reason}"] if broken else []

    def evaluate_runs(
        self,
        loader: ModelLoader,
        runs: Mapping[str, Path],
        data: str | None,
        *,
        split: str | None = None,
        device: str = "auto",
        reading: Reading = AS_IT_IS,
    ) -> tuple[dict[str, R], list[tuple[str, str]], list[str]]:
        """Return the report of each run, the pairs of runs that can be compared, and notes.

        Without data, the reports are those of val that the runs keep.
        """
        results: dict[str, ValReport[R]] = {}
        notes: list[str] = []
        for name, folder in runs.items():
            if data is None:
                if split or is_artifact(folder):
                    wrong = "--split needs images" if split else f"{folder} is an artifact and keeps no {self.kept}"
                    raise UsageError(f"{wrong}: patchloom evaluate {folder} DATA{' --split ' + split if split else ''}")
                results[name] = self.read_val(folder)
                continue
            is_run = not is_artifact(folder)
            model = loader.load(folder, device=device) if is_run else loader.open_artifact(folder)
            images = self.open(data, model.labels, split=split, folder=folder if is_run else None, reading=reading)
            results[name], broken = self.evaluate_on(model, images)
            notes += [*images.notes, *broken]
        pairs = [
            (one, other)
            for one, other in combinations(results, 2)
            if results[one].fingerprint == results[other].fingerprint
            and self.names(results[one].report) == self.names(results[other].report)
        ]
        if len(results) > 1 and not pairs:
            notes.append(f"the runs have different images or {self.what}, so they are not compared")
        return {name: result.report for name, result in results.items()}, pairs, list(dict.fromkeys(notes))

    def reported(
        self, loader: ModelLoader, folder: Path, settings: ReportSettings
    ) -> tuple[R | None, ImageSet | None, list[str]]:
        """Return the report of a run on val or the split in the settings, its images as far as known, and notes."""
        notes: list[str] = []
        place = data_path(folder, attempted(lambda: read_run_metadata(folder), notes), settings.data)
        if settings.split is not None:
            model = loader.load(folder, device="cpu")
            opened = self.open(place, model.labels, split=settings.split, folder=folder, reading=settings.reading)
            val, broken = self.evaluate_on(model, opened)
            return val.report, opened, [*notes, *opened.notes, *broken]
        stored = attempted(lambda: self.read_val(folder), notes)
        if stored is None:
            return None, None, notes
        return stored.report, attempted(partial(self._val_images, folder, settings, place, stored), notes), notes

    def kept_val(self, folder: Path, data: str | None) -> tuple[R, ImageSet]:
        """Return the report on val that a run keeps, and its images."""
        val = self.read_val(folder)
        place = data_path(folder, read_run_metadata(folder), data)
        return val.report, self._val_images(folder, ReportSettings(), place, val)

    def _val_images(self, folder: Path, settings: ReportSettings, place: str, val: ValReport[R]) -> ImageSet:
        """Return the images of a report on val; raise DataError if the data have changed."""
        plan: Any = settings.plan
        if plan is not None:
            images: ImageSet = plan.splits.val
            return images
        images = self.open(place, self.names(val.report), split="val", folder=folder, reading=settings.reading)
        if fingerprint(images) != val.fingerprint:
            raise DataError(f"images are not shown: those of {place} are not the ones the run was validated on")
        return images

    def model_to_look_at(self, loader: ModelLoader, folder: Path, paths: Sequence[str], notes: list[str]) -> Any:
        """Load a run or an artifact to predict single images.

        An artifact stores no val images, so it needs `paths`.
        """
        if not is_artifact(folder):
            return loader.load(folder, device="cpu")
        if not paths:
            raise UsageError(
                f"{folder} is an artifact without {self.kept}; pass images: patchloom look {folder} IMAGE…"
            )
        notes.append("an artifact has no attention maps; use the run that it was exported from")
        return loader.open_artifact(folder)


def p_value(differences: np.ndarray) -> tuple[tuple[float, float], float]:
    """Return the 95 % interval and the two-sided p of differences that a bootstrap over images gives."""
    low, high = np.quantile(differences, [0.025, 0.975])
    share = min(float((differences <= 0).mean()), float((differences >= 0).mean()))
    return (float(low), float(high)), min(1.0, 2 * share)


def worst_gallery(images: ImageSet | None, mistakes: Iterable[tuple[int, str]], title: str, text: str) -> list[Markup]:
    """Return a gallery of mistakes, each a position and a caption; images that cannot be read are left out."""
    pictures, captions = [], []
    for index, words in mistakes if images is not None else ():
        assert images is not None
        try:
            pictures.append(displayed(images.read(index), SIDE))
        except DataError:
            continue
        captions.append(f"{Path(images.key(index)).name}: {words}")
    return [gallery_section("mistakes", title, text, [(pictures, captions)])] if pictures else []


def inputs_with_maps(
    model: Any, images: Sequence[Image.Image], values: np.ndarray, **settings: Any
) -> list[tuple[Image.Image, list[Any]]]:
    """Return each image as the network sees it and the maps of some of its values (N, K); an artifact has no maps.

    The model has `neutral`; `settings` are further fields of `NetworkInputs`.
    """
    if not isinstance(model.model, Network):
        transform = model.classifier.transform()
        return [(Image.fromarray(transform(image)), []) for image in images]
    inputs = network_inputs(model.model, model.preprocessing, images)
    inputs = replace(inputs, probabilities=values, neutral=model.neutral, **settings)
    return [(one.input_image, one.maps) for one in looks(inputs, model.labels)]
