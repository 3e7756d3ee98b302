"""Train with your own transforms: of one image, as torchvision's v2 or albumentations, and of a batch."""

# %% A transform of one image: PIL in; PIL, an array or a tensor out.
import tempfile

import torch
from torchvision.transforms import v2

import patchloom

augment = v2.Compose([v2.RandomResizedCrop(32, scale=(0.5, 1)), v2.RandomRotation(15), v2.ColorJitter(0.3, 0.3)])


# %% A transform of a batch: float images of 0…1, (B, 3, H, W), on the training device.
def noise(images):
    """Add noise."""
    return (images + 0.05 * torch.randn_like(images)).clamp(0, 1)


# %% Random numbers are seeded per image: results do not depend on the workers, and a stopped run resumes exactly.
with tempfile.TemporaryDirectory() as folder:
    tiny = {"model.options.depth": 1, "model.options.dim": 32, "model.options.patch_size": 4}
    run = patchloom.train(
        "shapes:count=64,size=32", model="resmlp_s12", transform=augment, batch_transform=noise, epochs=2, set=tiny,
        out=f"{folder}/run", device="cpu", workers=0,
    )  # fmt: skip
    print("top-1", run.metrics["top1"])
