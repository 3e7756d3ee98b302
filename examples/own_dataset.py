"""Train on your own Dataset: images and targets that Python code reads or computes."""

# %% A Dataset of (image, target). An image is anything that `predict` accepts; a target is a name or a number.
import tempfile

import numpy as np
import torch

import patchloom


class Tinted(torch.utils.data.Dataset):
    """Noise with a tint of red or blue."""

    def __init__(self, count, seed):
        self.count, self.seed = count, seed

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = np.random.default_rng((self.seed, index))  # the same image each time it is read
        image = generator.integers(0, 100, (32, 32, 3), dtype=np.uint8)
        kind = ("red", "blue")[index % 2]
        image[..., 0 if kind == "red" else 2] += 60
        return image, kind


# %% Train and evaluate. A dict has splits; without one, part of the images is held out.
with tempfile.TemporaryDirectory() as folder:
    data = {"train": Tinted(96, seed=0), "val": Tinted(32, seed=1), "test": Tinted(32, seed=2)}
    tiny = {"model.options.depth": 1, "model.options.dim": 32, "model.options.patch_size": 4}
    run = patchloom.train(data, model="resmlp_s12", epochs=4, set=tiny, out=f"{folder}/run", device="cpu", workers=0)
    print("test", patchloom.evaluate(run.folder, data, split="test", device="cpu"))

    # %% The same images as arrays.
    images, kinds = zip(*(Tinted(32, seed=3)[i] for i in range(32)), strict=True)
    print("arrays", patchloom.load(run.folder, device="cpu").evaluate((np.stack(images), list(kinds))).values()["top1"])
