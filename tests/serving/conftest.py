"""A tiny trained classifier, served in this process."""

from pathlib import Path

import pytest

import patchloom
from patchloom.serving.app import App
from patchloom.serving.served_model import describe, verb_functions
from tests.golden import make
from tests.serving.clients import InThisProcess

GOLDEN = Path(make.__file__).parent
PICTURES = [(GOLDEN / "pictures" / f"{number}.png").read_bytes() for number in range(3)]


@pytest.fixture(scope="session")
def classifier() -> patchloom.Classifier:
    return patchloom.load(GOLDEN / "classifier", device="cpu")


@pytest.fixture
def app(classifier: patchloom.Classifier) -> App:
    return App(InThisProcess(verb_functions(classifier), describe(classifier)), "golden")
