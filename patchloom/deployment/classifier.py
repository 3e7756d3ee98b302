"""A trained model as it is used: with its labels and its preprocessing."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from patchloom.build import is_run, make_evaluation_loader
from patchloom.checkpoint import RunFiles, atomic_write, load_network, save_weights, write_run_files
from patchloom.data.augment import test_transform
from patchloom.data.decode import EXTENSIONS, decode
from patchloom.data.loader import normalise
from patchloom.data.sets import ClassTable
from patchloom.data.source import open_for
from patchloom.errors import DataError, UsageError
from patchloom.evaluation.classification import ClassificationReport, evaluate
from patchloom.evaluation.labels import open_v2, read_real_labels, real_accuracy, real_labels_of
from patchloom.models.network import Network

PREDICTED_AT_ONCE = 32


@dataclass(frozen=True)
class Answer:
    """What the classifier says of one file."""

    path: str
    answers: list[tuple[str, float]]  # class name, probability; likeliest first
    error: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """The numbers of a classifier on a data set."""

    report: ClassificationReport
    real: float | None  # ReaL's accuracy, where it was asked for
    notes: tuple[str, ...]

    def values(self) -> dict[str, float]:
        """Name → value, in the order of a table."""
        return dict(self.report) | ({} if self.real is None else {"real": self.real})


class Classifier:
    """A network in eval mode, the names of its classes, and the way pictures are shown to it."""

    def __init__(self, model: Network, files: RunFiles) -> None:
        self.model = model
        self.labels = files.labels
        self.preprocessing = files.preprocessing
        self._files = files
        shown = files.preprocessing
        self._transform = test_transform(shown.image_size, shown.crop_ratio, shown.interpolation)

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.model.parameters()).device

    def preprocess(self, picture: Image.Image) -> Tensor:
        """An RGB picture of any size → (3, H, W), resized, cropped and normalised as in training."""
        pixels = torch.from_numpy(self._transform(picture).copy()).permute(2, 0, 1)[None]
        return normalise(pixels, self.preprocessing.mean, self.preprocessing.std)[0]

    @torch.inference_mode()
    def predict(self, pictures: Sequence[Image.Image], *, top: int = 3) -> list[list[tuple[str, float]]]:
        """The `top` likeliest classes of each picture, by name, with their probabilities."""
        batch = torch.stack([self.preprocess(picture.convert("RGB")) for picture in pictures]).to(self.device)
        found = self.model(batch).softmax(dim=-1).topk(min(top, len(self.labels)))
        rows = zip(found.indices.tolist(), found.values.tolist(), strict=True)
        return [[(self.labels[i], share) for i, share in zip(*row, strict=True)] for row in rows]

    def predict_files(self, paths: Sequence[str], *, top: int = 3) -> Iterator[Answer]:
        """One answer a file, in order; folders are searched; a file that cannot be read is an answer with `error`."""
        waiting: list[tuple[str, Image.Image | str]] = []
        for path in _files_of(paths):
            try:
                waiting.append((path, decode(Path(path), path)))
            except DataError as error:
                waiting.append((path, str(error)))
            if len(waiting) == PREDICTED_AT_ONCE:
                yield from self._answers(waiting, top)
                waiting = []
        yield from self._answers(waiting, top)

    def _answers(self, waiting: list[tuple[str, Image.Image | str]], top: int) -> Iterator[Answer]:
        pictures = [picture for _, picture in waiting if isinstance(picture, Image.Image)]
        found = iter(self.predict(pictures, top=top) if pictures else [])
        for path, picture in waiting:
            if isinstance(picture, str):
                yield Answer(path, [], picture)
            else:
                yield Answer(path, next(found))

    def evaluate(
        self,
        data: str,
        *,
        split: str | None = None,
        size: int | None = None,
        crop_ratio: float | None = None,
        real: str | None = None,
        v2: bool = False,
        batch: int = 64,
        workers: int = 0,
        strict: bool = False,
    ) -> Evaluation:
        """Numbers on any data with the model's classes, matched by name.

        `real` is the path of ImageNet-ReaL's labels; `v2` says that folders are class numbers, as in ImageNet-V2.
        """
        table = ClassTable(self.labels)
        model = self.model if size is None else self.model.for_images_of(size)
        pictures = open_v2(data, table) if v2 else open_for(data, table, split=split, strict=strict)
        loader = make_evaluation_loader(
            pictures,
            size or self.preprocessing.image_size,
            crop_ratio or self.preprocessing.crop_ratio,
            batch_size=batch,
            device=self.device,
            workers=workers,
        )
        shown = self.preprocessing
        report = evaluate(model, loader.epoch(0), classes=self.labels, pixel_mean=shown.mean, pixel_std=shown.std)
        right = None
        if real is not None:
            names = [pictures.where(int(i)) for i in report.index]
            right = real_accuracy(report.predictions, real_labels_of(names, read_real_labels(real)))
        notes = list(pictures.notes)
        if loader.broken:
            first = next(iter(loader.broken.values()))
            notes.append(f"{len(loader.broken)} pictures cannot be read and do not count; the first: {first}")
        return Evaluation(report, right, tuple(notes))

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the model, labels, preprocessing and a model card: the hub's form, and a folder `load` reads."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        write_run_files(target, self.model, self.preprocessing, self._files.recipe, self.labels)
        save_weights(target, dict(self.model.state_dict()), {})
        atomic_write(target / "README.md", model_card(self).encode())

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], *, device: str = "auto") -> "Classifier":
        """What `save_pretrained` or `push_to_hub` left, under the hub's name for it; the same as `patchloom.load`."""
        return load(source, device=device)

    def push_to_hub(self, repository: str, *, private: bool = False) -> str:
        """Upload the model to the Hugging Face hub; returns its address."""
        import tempfile

        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return str(api.upload_folder(repo_id=repository, folder_path=folder))


def load(source: str | os.PathLike[str], *, device: str = "auto") -> Classifier:
    """The classifier of a run folder, or of a hub repository 'user/name'."""
    folder = Path(source)
    if not is_run(str(source)):
        if folder.exists() or str(source).count("/") != 1 or str(source).startswith((".", "/", "runs/")):
            raise UsageError(f"{source} is not the folder of a run: it has no config.json")
        folder = _from_hub(str(source))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    network, files = load_network(folder)
    return Classifier(network.for_images_of(files.preprocessing.image_size).to(device), files)


def _from_hub(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise UsageError(f"{repository} is neither a run folder here nor a repository of the hub: {reason}") from error


def model_card(classifier: Classifier) -> str:
    """What a stranger needs to know of the model, in the hub's form."""
    config, recipe = classifier.model.config, classifier._files.recipe
    shown = classifier.preprocessing
    labels = ", ".join(classifier.labels[:20]) + (" …" if len(classifier.labels) > 20 else "")
    trained = f"Trained with the recipe `{recipe.name}` ({recipe.source})" if recipe else "Training recipe unknown"
    return f"""---
library_name: patchloom
pipeline_tag: image-classification
tags: [image-classification, patchloom]
---

# {config.name}, {len(classifier.labels)} classes

{trained}. Classes: {labels}

Images are resized so that a centre crop of {shown.image_size[0]}×{shown.image_size[1]} is {shown.crop_ratio:g} of the
short side ({shown.interpolation}), divided by 255, and normalised by mean {list(shown.mean)} and deviation
{list(shown.std)}.

```python
import patchloom

classifier = patchloom.load("this/folder")
classifier.predict([picture])  # PIL images → names and probabilities
```
"""


def _files_of(paths: Sequence[str]) -> Iterator[str]:
    """Image files, and those inside folders."""
    for path in paths:
        if not os.path.isdir(path):
            yield path
            continue
        found = sorted(str(p) for p in Path(path).rglob("*") if p.suffix.lower() in EXTENSIONS and p.is_file())
        if not found:
            raise UsageError(f"{path} holds no images")
        yield from found
