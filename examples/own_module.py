"""Train your own `nn.Module`, load it again and export it."""

# %% A module: normalized images in, one logit per class out.
import tempfile

import torch
from torch import nn

import patchloom


class Net(nn.Module):
    """A small convnet."""

    def __init__(self, num_classes, width=16):
        super().__init__()
        layers = []
        for inputs, outputs in ((3, width), (width, 2 * width)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.fc = nn.Linear(2 * width, num_classes)

    def forward(self, images):
        return self.fc(self.body(images).mean((2, 3)))


# %% Pass the class: it is called with the number of classes of the data. A module works as well.
with tempfile.TemporaryDirectory() as folder:
    data = "shapes:count=64,size=32"
    run = patchloom.train(data, model=Net, epochs=2, size=32, out=f"{folder}/run", device="cpu", workers=0)

    # %% A run stores weights, not code: another process passes the module again.
    classifier = patchloom.load(run.folder, model=Net, device="cpu")
    print("classes", classifier.predict(torch.zeros(3, 32, 32), top=2))
    print("features", tuple(classifier.embed(torch.zeros(3, 32, 32)).shape))  # the input of `fc`

    # %% An artifact needs neither patchloom nor the code.
    print(patchloom.export(str(run.folder), f"{folder}/onnx", images=8))
