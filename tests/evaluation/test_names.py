"""The page of numbers names every number, and the code yields no other."""

import re
from pathlib import Path

import numpy as np
import torch

from patchloom.data.datasets import ClassTable
from patchloom.evaluation.comparison import compare
from patchloom.evaluation.embeddings import Embeddings
from patchloom.evaluation.knn import knn
from patchloom.evaluation.probe import few_shot_probe, linear_probe
from patchloom.evaluation.retrieval import retrieval
from patchloom.evaluation.separability import separability
from patchloom.evaluation.sgd_probe import sgd_probe
from patchloom.evaluation.translation import translation_scores
from patchloom.tasks.classification.seeds import spread
from tests.evaluation.test_comparison import report

PAGE = (Path(__file__).parent.parent.parent / "docs" / "evaluation.md").read_text("utf-8")


def test_every_number_is_on_the_page() -> None:
    images = Embeddings(torch.randn(120, 4), torch.arange(120) % 6, torch.arange(120))
    six = report(np.arange(12) % 2 > 0, classes=tuple("abcdef"))
    taxonomy = ClassTable(tuple("abcdef"), {"coarse": (("u", "v"), (0, 0, 0, 1, 1, 1))})
    result = [
        *six, *compare({"a": six, "b": six})[0], *knn(images, images, classes=6),
        *linear_probe(images, images, classes=6, strengths=(0.1,)),
        *sgd_probe(lambda _: [images], images, images, classes=6, steps_per_epoch=1, epochs=1),
        *few_shot_probe(images, images, classes=tuple("abcdef")),
        *retrieval(images, images, classes=taxonomy, trained_level="coarse", softmax=torch.rand(120, 2)),
        *separability(images, classes=6, posterior=torch.rand(120, 6), splits=2),
        *translation_scores(["a b"], ["a c"]), *[(name, 0.0) for name in ("perplexity", "tokens")],  # of `token_loss`
    ]  # fmt: skip
    named = set(re.findall(r"`([a-z0-9_]+)`", PAGE))
    assert {name for name, _ in result} <= named
    in_tables = {
        name
        for line in PAGE.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    of_others = {"top1_low", "top1_high", "real", "answered", "answered_error"} | {
        "mean",
        "std",
        "best",
        "test",
    }  # an `Evaluation`, a sweep
    assert in_tables - {name for name, _ in result} == of_others
    for name, _ in spread("", [1.0, 2.0]):
        assert name == "_runs" or f"`…{name}`" in PAGE
