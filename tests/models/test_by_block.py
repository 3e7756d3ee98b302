"""Networks compiled block by block compute the same, and share what was compiled."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import patchloom
from patchloom.engine.distribution import unwrap
from patchloom.models.by_block import CompiledByBlock
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


def test_the_compiler_sees_channels_where_it_expects_them() -> None:
    seen: list[torch.Tensor] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        seen.extend(each for each in inputs if each.ndim == 4 and len(each) == 2)
        return graph.forward

    network = patchloom.create_model("patchconvnet_s60", image_size=48, num_classes=3, dim=8, depth=2)
    torch.compiler.reset()
    with torch.no_grad():
        CompiledByBlock(network, backend=backend)(torch.randn(2, 3, 48, 48))
    torch.compiler.reset()
    assert [maps.shape for maps in seen] == [(2, 8, 3, 3)]


def test_deep_networks_are_compiled_by_block() -> None:
    with torch.device("meta"):
        deep, flat = (patchloom.create_model("resmlp_s12", depth=depth) for depth in (MOST_BLOCKS + 1, MOST_BLOCKS))
        small = patchloom.create_model("resmlp_s12", depth=MOST_BLOCKS + 1, image_size=32)
    assert compiles_by_block(deep)
    assert not compiles_by_block(flat)
    assert not compiles_by_block(small)
    deep.gradient_checkpointing = True
    assert not compiles_by_block(deep)
