"""A trained model as it is used: with its labels and its preprocessing."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from patchloom.build import is_run, make_evaluation_loader
from patchloom.checkpoint import RunFiles, load_network
from patchloom.data.augment import test_transform
from patchloom.data.decode import EXTENSIONS, decode
from patchloom.data.loader import normalise
from patchloom.data.sets import ClassTable
from patchloom.data.source import open_for
from patchloom.errors import DataError, UsageError
from patchloom.evaluation.classification import ClassificationReport, evaluate
from patchloom.evaluation.labels import read_real, real_accuracy
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
    """Numbers of one evaluation, with ReaL's where they were asked for."""

    report: ClassificationReport
    real: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.report, name)

    def values(self) -> Iterator[tuple[str, float]]:
        """(name, value) pairs."""
        yield from self.report
        if self.real is not None:
            yield "real", self.real
