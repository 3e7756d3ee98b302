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

from patchloom.data.batches.decoded_dataset import make_evaluation_loader
from patchloom.engine.distribution import Processes
from patchloom.evaluation.embeddings import embed
from patchloom.evaluation.probe import fit_logistic
from patchloom.models.network import Network
from patchloom.tasks.images.plan import ImagePlan

MOST_IMAGES = 20_000  # of which the features are taken; more change little and take long
L2, STEPS = 1e-2, 50  # a start, not a result: the training that follows goes on from it
BATCH = 128


@torch.no_grad()
def fit_head(plan: ImagePlan, network: Network, processes: Processes) -> int:
    """Fit the classifier to training images, in place; to how many."""
    recipe, images = plan.recipe, plan.splits.train
    some: Any = np.random.default_rng(recipe.seed).permutation(np.flatnonzero(images.labels >= 0))[:MOST_IMAGES]
    some = replace(images, rows=images.rows[some], labels=images.labels[some])  # type: ignore[type-var, attr-defined]
    loader = make_evaluation_loader(
        some,
        network.config.image_size,
        recipe.test.crop_ratio,
        resize=recipe.test.resize,
        batch_size=BATCH,
        device=processes.device,
        workers=plan.workers,
        timeout_s=plan.settings.worker_timeout,
    )
    with processes.autocast():
        found = embed(network, loader.epoch(0))
    loader.close()
    fitted = fit_logistic(found.vectors, found.labels, len(plan.splits.classes), L2, steps=STEPS)
    classifier: Any = network.get_submodule("classifier")
    scaled = fitted.weight / fitted.std.double()[:, None]  # (C, K)
    classifier.weight.copy_(scaled.T)
    classifier.bias.copy_(fitted.bias - fitted.mean.double() @ scaled)
    return len(found)


def fits_head(network: Network) -> bool:
    """Whether one linear layer on pooled features is the whole of its classifier."""
    return [*network.classifiers()] == ["classifier"] and isinstance(network.get_submodule("classifier"), nn.Linear)
