"""The head first: a new classifier on a trained network begins as the best linear one of its features.

A classifier that starts at random pulls the trained weights apart in the first steps, before it knows which features
are good (Kumar et al., arXiv 2202.10054). The linear problem is convex, so it is solved rather than trained: features
of training images as they are tested, without augmentation, and `evaluation.probe`'s logistic regression.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from patchloom.data.batches.evaluation_loader import make_evaluation_loader
from patchloom.engine.distribution import Processes
from patchloom.evaluation.embeddings import embed
from patchloom.evaluation.probe import linear_probe
from patchloom.models.network import Network
from patchloom.tasks.image_plan import ImagePlan

MOST_IMAGES = 20_000  # of which the features are taken; more change little and take long
BATCH = 128


@torch.no_grad()
def fit_head(plan: ImagePlan, network: Network, processes: Processes) -> float:
    """Fit the classifier to the training images, in place; its top-1 on a part of train that is held out of the fit."""
    recipe, images = plan.recipe, plan.splits.train
    some: Any = np.random.default_rng(recipe.seed).permutation(np.flatnonzero(images.labels >= 0))[:MOST_IMAGES]
    some = replace(images, rows=images.rows[some], labels=images.labels[some])  # type: ignore[type-var, attr-defined]
    loader = make_evaluation_loader(
        some,
        network.config.image_size,
        recipe.test.crop_ratio,
        batch_size=BATCH,
        device=processes.device,
        workers=plan.workers,
        timeout_s=plan.settings.worker_timeout,
    )
    with processes.autocast():
        found = embed(network, loader.epoch(0))
    loader.close()
    probe = linear_probe(found, found, classes=len(plan.splits.classes))
    classifier: Any = network.get_submodule("classifier")
    scaled = probe.classifier.weight / probe.classifier.std.double()[:, None]  # (C, K)
    classifier.weight.copy_(scaled.T)
    classifier.bias.copy_(probe.classifier.bias - probe.classifier.mean.double() @ scaled)
    return probe.held_out_top1[probe.l2]


def fits_head(network: Network) -> bool:
    """Whether one linear layer on pooled features is the whole of its classifier."""
    return [*network.classifiers()] == ["classifier"] and isinstance(network.get_submodule("classifier"), nn.Linear)
