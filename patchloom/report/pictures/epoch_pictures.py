"""A picture every few epochs, so that one can watch a network learn: RUN/pictures/epoch_0010.png.

The norms of its residual branches are kept beside them, for the report to draw all epochs in one chart.
"""

import io
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import nn

from patchloom.disk import atomic_write
from patchloom.engine.distribution import unwrap
from patchloom.engine.state import weights_of
from patchloom.models.network import Network
from patchloom.models.registry import family_of
from patchloom.report.pictures.branches import has_branches, norms_by_layer
from patchloom.report.pictures.look import show
from patchloom.report.pictures.pictures import Picture, PictureNote, pictures_of
from patchloom.report.pictures.sheets import SheetCell, SheetRow, sheet
from patchloom.runs.branch_norms import add_branch_norms
from patchloom.runs.config import Preprocessing

DRAWN = 2  # pictures on a sheet: where the network looks, and what mixes its patches


class EpochPictures:
    """Called by the engine with the model and the epochs done; draws every `every` epochs and after the last.

    It draws a copy on the CPU, so that compiled, sharded and half-precision networks look alike and nothing of the
    training changes. All ranks call it, since they gather split weights together; rank 0 draws.
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
        is_main: bool = True,
    ) -> None:
        self._run, self._images, self._class_names = run, images, class_names
        self._preprocessing, self._every, self._last, self._is_main = preprocessing, every, last, is_main

    def __call__(self, model: nn.Module, epoch: int) -> None:
        """Write the picture, if it is time for one."""
        if epoch % self._every and epoch != self._last:
            return
        weights = weights_of(model)
        network = unwrap(model)
        if not self._is_main or not isinstance(network, Network):
            return
        copy = family_of(network.config.name)(network.config)
        copy.load_state_dict({name: tensor.cpu() for name, tensor in weights.items()})
        with torch.autocast("cpu", enabled=False):
            drawn = pictures_of(copy, self._images, self._class_names, preprocessing=self._preprocessing)
            if self._images and has_branches(copy):
                shown = show(copy, self._preprocessing, self._images)
                add_branch_norms(self._run, epoch, norms_by_layer(shown.network, shown.images))
        file = io.BytesIO()
        epoch_sheet(epoch, drawn).save(file, "PNG")
        atomic_write(self._run / "pictures" / f"epoch_{epoch:04d}.png", file.getvalue())


def epoch_sheet(epoch: int, drawn: Sequence[Picture]) -> Image.Image:
    """The first pictures below one another; one that could not be drawn says why."""
    blank = Image.new("RGB", (1, 1))
    lines = []
    for title, image, _ in drawn:
        if isinstance(image, Image.Image):
            lines.append(SheetRow(f"epoch {epoch}: {title.lower()}", [SheetCell(image)]))
        elif isinstance(image, PictureNote):
            lines.append(SheetRow(f"epoch {epoch}: {title.lower()}: {image.striptags()}", [SheetCell(blank)]))
    return sheet(lines[:DRAWN])
