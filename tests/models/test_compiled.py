"""Networks compiled block by block compute the same, and share what was compiled."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._inductor import config

import patchloom
from patchloom.engine.distribution import unwrap
from patchloom.models.compiled import CompiledByBlock
from patchloom.training.assemble import MOST_BLOCKS, compiles_by_block


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
@pytest.mark.parametrize(("name", "shapes"), [("resmlp_s12", 1), ("patchconvnet_s60", 1), ("smlpnet_t", 2)])
def test_blocks_of_one_shape_are_compiled_once(name: str, shapes: int) -> None:
    small = {"dim": 8, "depths": (2, 2)} if name == "smlpnet_t" else {"dim": 8, "depth": 3}
    torch.manual_seed(0)
    network = patchloom.create_model(name, image_size=32, num_classes=3, drop_path=0.0, **small)
    images = torch.randn(2, 3, 32, 32)
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = CompiledByBlock(network, backend=counter)
    gradients = []
    for model in (network, compiled):
        model.zero_grad()
        out = model(images)
        out.square().sum().backward()
        gradients.append([out.detach(), *(parameter.grad.clone() for parameter in network.parameters())])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert counter.frame_count == shapes
    assert unwrap(compiled) is network
    assert compiled.config is network.config
    torch.compiler.reset()


@pytest.mark.parametrize("is_cuda", [True, False])
def test_for_a_gpu_the_compiler_leaves_maps_as_they_lie(is_cuda: bool) -> None:
    class Images:
        """As much of them as is looked at."""

    class Notes(torch.nn.Module):
        kept_for_backward = 1.0

        def forward(self, images: Images) -> bool:
            return config.layout_optimization

        def repeated_blocks(self) -> list[torch.nn.Module]:
            return []

    images = Images()
    images.is_cuda = is_cuda  # type: ignore[attr-defined]
    assert CompiledByBlock(Notes())(images) is not is_cuda  # type: ignore[arg-type]


def test_deep_networks_are_compiled_by_block() -> None:
    with torch.device("meta"):
        deep, flat = (patchloom.create_model("resmlp_s12", depth=depth) for depth in (MOST_BLOCKS + 1, MOST_BLOCKS))
        small = patchloom.create_model("resmlp_s12", depth=MOST_BLOCKS + 1, image_size=32)
    assert compiles_by_block(deep, captured=False)
    assert not compiles_by_block(flat, captured=False)
    assert not compiles_by_block(small, captured=False)
    assert compiles_by_block(small, captured=True)
    deep.gradient_checkpointing = True
    assert not compiles_by_block(deep, captured=True)
