"""Fit a new classifier to the features of a trained network before training.

A random classifier distorts the trained weights in the first steps (Kumar et al., arXiv 2202.10054). The linear problem
is convex, so it is solved rather than trained: logistic regression (`evaluation.probe`) on features of training images
without augmentation.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from patchloom.data.batches.decoded_dataset import make_evaluation_loader
from patchloom.data.labels.class_balance import class_counts, logit_adjustment
from patchloom.engine.distribution import Processes
from patchloom.evaluation.embeddings import embed
from patchloom.evaluation.probe import fit_logistic
from patchloom.models.network import Network
from patchloom.tasks.images.plan import ImagePlan

MOST_IMAGES = 20_000  # whose features are computed; more change little and take long
L2, STEPS = 1e-2, 50  # rough, as training continues from here
BATCH = 128


@torch.no_grad()
def fit_head(plan: ImagePlan, network: Network, processes: Processes) -> int:
    """Fit the classifier to training images, in place, and return their number."""
    recipe, images = plan.recipe, plan.splits.train
    some: Any = np.random.default_rng(recipe.seed).permutation(np.flatnonzero(images.labels >= 0))[:MOST_IMAGES]
    some = images.subset(some)  # type: ignore[attr-defined]
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
        embedded = embed(network, loader.epoch(0))
    loader.close()
    fitted = fit_logistic(embedded.vectors, embedded.labels, len(plan.splits.classes), L2, steps=STEPS)
    classifier: Any = network.get_submodule("classifier")
    scaled = fitted.weight / fitted.std.double()[:, None]  # (C, K)
    classifier.weight.copy_(scaled.T.to(classifier.weight.dtype))
    classifier.bias.copy_((fitted.bias - fitted.mean.double() @ scaled).to(classifier.bias.dtype))
    if tau := recipe.balance.logit_adjustment:  # the loss will add it again
        counts = class_counts(images.labels, len(plan.splits.classes))
        classifier.bias -= torch.from_numpy(logit_adjustment(counts, tau, recipe.objective.loss)).to(classifier.bias)
    return len(embedded)


def fits_head(network: Network) -> bool:
    """Return whether the classifier is one linear layer on pooled features."""
    return [*network.classifiers()] == ["classifier"] and isinstance(network.get_submodule("classifier"), nn.Linear)
