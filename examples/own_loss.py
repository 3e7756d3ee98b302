"""Train with your own loss, and choose the best weights by your own metric."""

# %% A loss of logits (B, K) and class numbers (B,); of shares (B, K) if the recipe mixes images.
import tempfile

import torch
import torch.nn.functional as F

import patchloom


def focal(outputs, targets, gamma=2.0):
    """Focal loss (Lin et al., arXiv 1708.02002), for class numbers."""
    log_share = F.log_softmax(outputs, dim=1).gather(1, targets[:, None])
    return -((1 - log_share.exp()) ** gamma * log_share).mean()


# %% A metric of the logits and class numbers of all val images.
def worst_class(outputs, targets):
    """Accuracy on the worst class, in percent."""
    right = outputs.argmax(1) == targets
    return 100 * min(right[targets == label].float().mean().item() for label in targets.unique())


# %% Mixed images have shares of classes as targets, which this loss does not take.
with tempfile.TemporaryDirectory() as folder:
    tiny = {"model.options.depth": 1, "model.options.dim": 32, "model.options.patch_size": 4}
    run = patchloom.train(
        "shapes:count=64,size=32", model="resmlp_s12", loss=focal, metrics=[worst_class], select="worst_class",
        optimizer=lambda parameters: torch.optim.NAdam(parameters, lr=2e-3), epochs=2, out=f"{folder}/run",
        set=tiny | {"augment.mixup": 0, "augment.cutmix": 0}, device="cpu", workers=0,
    )  # fmt: skip
    print("worst class", run.metrics["worst_class"])
