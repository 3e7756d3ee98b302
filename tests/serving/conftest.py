"""A tiny trained classifier, served in this process."""

from pathlib import Path
from typing import Any

import pytest

import patchloom
from patchloom.serving.app import App
from patchloom.serving.limits import Limits
from patchloom.serving.served_model import ServedModel, describe, served_verbs
from patchloom.tasks.table import task_named
from tests.golden import make
from tests.serving.clients import InThisProcess

GOLDEN = Path(make.__file__).parent
IMAGE_FILES = [(GOLDEN / "pictures" / f"{number}.png").read_bytes() for number in range(3)]


@pytest.fixture(scope="session")
def classifier() -> patchloom.Classifier:
    return patchloom.load(GOLDEN / "classifier", device="cpu")


@pytest.fixture
def app(classifier: patchloom.Classifier) -> App:
    return App(in_this_process(classifier), "golden")


def in_this_process(model: Any, task: str = "classification", limits: Limits | None = None) -> InThisProcess:
    served = ServedModel(task_named(task), model)
    return InThisProcess(served_verbs(served), describe(served), limits)
