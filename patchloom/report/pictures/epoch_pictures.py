"""Pictures of a network every few epochs of its training: RUN/pictures/epoch_0010.png.

The norms of its residual branches are stored next to them, so that the report can draw all epochs in one chart.
"""

import io
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import nn

from patchloom.disk import atomic_write
from patchloom.engine.distribution import unwrap, whole
from patchloom.engine.state import weights_of
from patchloom.models.network import Network
from patchloom.models.registry import family_of
from patchloom.report.pictures.branches import has_branches, norms_by_layer
from patchloom.report.pictures.look import network_inputs
from patchloom.report.pictures.pictures import Picture, PictureNote, pictures_of
from patchloom.report.pictures.sheets import SheetCell, SheetRow, sheet
from patchloom.runs.branch_norms import add_branch_norms
from patchloom.runs.config import Preprocessing

MAX_PICTURES = 2  # on a sheet: attention maps, and what mixes the patches


class EpochPictures:
    """A callback of the engine that draws the model every `every` epochs and after the last.

    It draws a copy on the CPU, so that compiled, sharded and half-precision networks look alike and the training is not
    affected. All ranks call it, since they gather sharded weights together; rank 0 draws.
    """

    def __init__(
        self,
        run: Path,
        images: Sequence[Image.Image],
        class_names: Sequence[str],
        *,
        preprocessing: Preprocessing,
        every: int,
        last: int,
        has_classes: bool = True,
        is_main: bool = True,
    ) -> None:
        """Without classes that compete, such as for labels and numbers, the pictures are those of weights."""
        self._run, self._images, self._class_names = run, images, class_names
        self._preprocessing, self._every, self._last, self._is_main = preprocessing, every, last, is_main
        self._mapped = images if has_classes else None

    def __call__(self, model: nn.Module, epoch: int) -> None:
        """Write the picture if one is due."""
        if epoch % self._every and epoch != self._last:
            return
        weights = {name: whole(tensor) for name, tensor in weights_of(model).items()}
        network = unwrap(model)
        if not self._is_main or not isinstance(network, Network):
            return
        copy = family_of(network.config.name)(network.config)
        copy.load_state_dict({name: tensor.cpu() for name, tensor in weights.items()})
        with torch.autocast("cpu", enabled=False):
            drawn = pictures_of(copy, self._mapped, self._class_names, preprocessing=self._preprocessing)
            if self._images and has_branches(copy):
                inputs = network_inputs(copy, self._preprocessing, self._images)
                add_branch_norms(self._run, epoch, norms_by_layer(inputs.network, inputs.images))
        file = io.BytesIO()
        epoch_sheet(epoch, drawn).save(file, "PNG")
        atomic_write(self._run / "pictures" / f"epoch_{epoch:04d}.png", file.getvalue())


def epoch_sheet(epoch: int, drawn: Sequence[Picture]) -> Image.Image:
    """Draw the first pictures below each other; a picture that could not be drawn is replaced by the reason."""
    blank = Image.new("RGB", (1, 1))
    rows = []
    for title, image, _ in drawn:
        if isinstance(image, Image.Image):
            rows.append(SheetRow(f"epoch {epoch}: {title.lower()}", [SheetCell(image)]))
        elif isinstance(image, PictureNote):
            rows.append(SheetRow(f"epoch {epoch}: {title.lower()}: {image.striptags()}", [SheetCell(blank)]))
    return sheet(rows[:MAX_PICTURES])
