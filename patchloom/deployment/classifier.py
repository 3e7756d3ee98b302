"""A trained model as it is used: with its labels and its preprocessing."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from patchloom.checkpoint import RunFiles, atomic_write, load_network, save_weights, write_run_files
from patchloom.data.augment import test_transform
from patchloom.data.decode import EXTENSIONS
from patchloom.data.loader import normalise
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.data.sets import ImageSet
from patchloom.data.video import frames_or_error
from patchloom.deployment.evaluations import (
    Evaluation,
    Probes,
    Shown,
    SweepPoint,
    embed_on,
    evaluate_on,
    probe_on,
    sweep_on,
)
from patchloom.deployment.hub import run_folder
from patchloom.deployment.run_record import data_files
from patchloom.errors import UsageError, at_least
from patchloom.evaluation.embeddings import Embeddings
from patchloom.models.network import Network

PREDICTED_AT_ONCE = 32


@dataclass(frozen=True)
class Answer:
    """What the classifier says of one file."""

    path: str
    answers: list[tuple[str, float]]  # class name, probability; likeliest first
    error: str | None = None


class Classifier:
    """A network in eval mode, the names of its classes, and the way pictures are shown to it."""

    def __init__(self, model: Network, files: RunFiles, folder: Path | None = None) -> None:
        self.model = model
        self.folder = folder  # of its run, which remembers its data
        self.labels = files.labels
        self.level = files.level  # of the taxonomy it was trained with
        self.preprocessing = files.preprocessing
        self._files = files
        shown = files.preprocessing
        self._transform = test_transform(shown.image_size, shown.crop_ratio, shown.interpolation)

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.model.parameters()).device

    def reading_of(self, data: str, given: Reading = AS_IT_IS) -> Reading:
        """How `data` are read: as is `given`, and for the rest as in training, where the model was trained on them."""
        return given.filled_from(data_files(self.folder, data)) if self.folder else given

    def check_decides(self) -> None:
        """A UsageError where the network has features but no classifier for named classes, as one trained by DINO."""
        if not self._files.decides:
            raise UsageError(
                f"{self.model.config.name} was trained without a classifier and cannot name classes. Measure its "
                "features with --knn or --linear, search by them with `patchloom index`, or train a classifier with "
                "`patchloom train DATA --init RUN`."
            )

    def preprocess(self, picture: Image.Image) -> Tensor:
        """An RGB picture of any size → (3, H, W), resized, cropped and normalised as in training."""
        pixels = torch.from_numpy(self._transform(picture).copy()).permute(2, 0, 1)[None]
        return normalise(pixels, self.preprocessing.mean, self.preprocessing.std)[0]

    @torch.inference_mode()
    def predict(self, pictures: Sequence[Image.Image], *, top: int = 3) -> list[list[tuple[str, float]]]:
        """The `top` likeliest classes of each picture, by name, with their probabilities."""
        at_least("top", top, 1)
        self.check_decides()
        batch = torch.stack([self.preprocess(picture.convert("RGB")) for picture in pictures]).to(self.device)
        found = self.model(batch).softmax(dim=-1).topk(min(top, len(self.labels)))
        rows = zip(found.indices.tolist(), found.values.tolist(), strict=True)
        return [[(self.labels[i], share) for i, share in zip(*row, strict=True)] for row in rows]

    def predict_files(self, paths: Sequence[str], *, top: int = 3, every: int | None = None) -> Iterator[Answer]:
        """One answer per file, in order; folders are searched; a file that cannot be read is an answer with `error`.

        Videos, animations and files of several pages have an answer for every `every`-th frame (see `data.video`).
        """
        self.check_decides()
        waiting: list[tuple[str, Image.Image | str]] = []
        for path in files_of(paths):
            for named in frames_or_error(path, every):
                waiting.append(named)
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

    def evaluate(self, data: str, **shown: Any) -> Evaluation:
        """Numbers on any data with the model's classes, matched by name; the options are those of `Shown`."""
        settings = Shown(**shown)
        self.check_decides()
        return evaluate_on(self, settings.open(data, self), settings)

    def probe(
        self,
        data: str,
        *,
        knn: Sequence[int] = (),
        linear: bool = False,
        few_shot: int | None = None,
        **shown: Any,
    ) -> Probes:
        """What the features tell of any data, of any classes: neighbours, a linear probe, one of a few shots a class.

        The probes learn from the train split and are judged on val; the model's own head is not used.
        """
        return probe_on(self, data, Shown(**shown), neighbours=knn, linear=linear, few_shot=few_shot)

    def sweep(
        self, data: str, over: Literal["crop", "size"], values: Sequence[float] | None = None, **shown: Any
    ) -> list[SweepPoint]:
        """The numbers at several crop ratios or image sizes; the usual ones where no values are given."""
        return sweep_on(self, data, Shown(**shown), over=over, values=values)

    def embed(self, pictures: ImageSet, **shown: Any) -> Embeddings:
        """One vector a picture: what the classifier reads."""
        return embed_on(self, pictures, Shown(**shown))

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the model, labels, preprocessing and a model card: the hub's form, and a folder `load` reads."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        write_run_files(target, self.model, self.preprocessing, self._files.recipe, self.labels, self.level)
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


def load(source: str | os.PathLike[str], *, device: str = "auto", trunk: bool = False) -> Classifier:
    """The classifier of a run folder, or of a repository of the Hugging Face hub, 'hub:user/name'.

    `trunk` leaves a projector out, so that images are compared by the vectors it was given.
    """
    folder = run_folder(source)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    network, files = load_network(folder)
    if trunk:
        network.drop_projector()
    return Classifier(network.for_images_of(files.preprocessing.image_size).to(device), files, folder)


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


def files_of(paths: Sequence[str]) -> Iterator[str]:
    """Image files, and those inside folders."""
    for path in paths:
        if not os.path.isdir(path):
            yield path
            continue
        found = sorted(str(p) for p in Path(path).rglob("*") if p.suffix.lower() in EXTENSIONS and p.is_file())
        if not found:
            raise UsageError(f"{path} holds no images")
        yield from found
