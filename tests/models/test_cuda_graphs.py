"""Captured networks compute the same as direct calls: with gradients, without, and if nothing can be replayed."""

import pytest
import torch
from torch import nn

import patchloom
from patchloom.engine.distribution import unwrap
from patchloom.models import cuda_graphs as recorded_module
from patchloom.models.compiled import CompiledByBlock
from patchloom.models.cuda_graphs import CapturedNetwork

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are recorded on a GPU")


def small_network(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return patchloom.create_model("smlpnet_t", image_size=32, num_classes=3, dim=8, depths=(2, 2), **options)


def test_it_stands_for_the_network() -> None:
    network, images = small_network(), torch.randn(2, 3, 32, 32)
    for inner in (network, CompiledByBlock(network)):
        captured = CapturedNetwork(inner)
        assert unwrap(captured) is network
        assert captured.config is network.config
        assert list(captured.state_dict()) == [f"_orig_mod.{name}" for name in network.state_dict()]
        assert captured.train(False)._orig_mod.training is False
    network.eval()
    torch.testing.assert_close(CapturedNetwork(network)(images), network(images))


def test_options_reach_the_network() -> None:
    class TwoHeads(nn.Module):
        def forward(self, images: torch.Tensor, *, both_heads: bool = False) -> object:
            return (images, 2 * images) if both_heads else images

        def repeated_blocks(self) -> list[nn.Module]:
            return []

        kept_for_backward = 1.0

    for wrapped in (CapturedNetwork(TwoHeads()), CompiledByBlock(TwoHeads())):  # type: ignore[arg-type]
        first, second = wrapped(torch.ones(1), both_heads=True)
        assert (first.item(), second.item()) == (1, 2)


@pytest.mark.parametrize("gradients", [True, False])
def test_what_cannot_be_recorded_is_called(gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        """As much of images as is looked at."""

        is_cuda, requires_grad, shape, dtype, clone = True, False, (2,), torch.float32, lambda self: self

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1), requires_grad=gradients)

        def forward(self, images: object) -> int:
            tried.append(images)
            return len(tried)

    def waits(*_: object, **__: object) -> None:
        raise RuntimeError("not permitted\nand more")

    tried: list[object] = []
    monkeypatch.setattr(recorded_module, "_Pass" if gradients else "capture", waits)
    captured = CapturedNetwork(Counts())
    with pytest.warns(UserWarning, match="not permitted$"):
        assert captured(OnGpu()) == 1
    assert captured(OnGpu()) == 2


@on_a_gpu
def test_training_is_the_same_to_the_bit() -> None:
    weights = []
    for wrap in (lambda network: network, CapturedNetwork):
        network = small_network(drop_path=0.2).cuda()
        model, optimizer = wrap(network), torch.optim.SGD(network.parameters(), 0.1)
        torch.manual_seed(1)
        for _ in range(3):
            images = torch.randn(4, 3, 32, 32, device="cuda")
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(images).float().square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append([value.clone() for value in network.state_dict().values()])
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)


@on_a_gpu
def test_two_passes_before_the_gradients_of_the_first() -> None:
    network = small_network(drop_path=0.0).cuda().eval()
    captured = CapturedNetwork(network)
    first, second = (torch.randn(2, 3, 32, 32, device="cuda") for _ in range(2))
    expected = torch.autograd.grad(network(first).sum() + network(second).square().sum(), network.parameters())
    result = torch.autograd.grad(captured(first).sum() + captured(second).square().sum(), network.parameters())
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other)
    other_size = torch.randn(3, 3, 32, 32, device="cuda")
    torch.testing.assert_close(captured(other_size), network(other_size))


@on_a_gpu
def test_inference_follows_the_weights() -> None:
    network = small_network().cuda().eval().requires_grad_(False)
    captured = CapturedNetwork(network)
    for count in (2, 3, 2):
        images = torch.randn(count, 3, 32, 32, device="cuda")
        torch.testing.assert_close(captured(images), network(images))
        network.classifier.weight.mul_(2)


@on_a_gpu
def test_gradients_of_micro_batches_add_up() -> None:
    network = small_network(drop_path=0.0).cuda().eval()
    captured = CapturedNetwork(network, accumulates=True)
    batches = [torch.randn(2, 3, 32, 32, device="cuda") for _ in range(3)]
    for images in batches:
        captured(images).square().sum().backward()
    result = [parameter.grad.clone() for parameter in network.parameters()]
    network.zero_grad()
    for images in batches:
        network(images).square().sum().backward()
    for one, other in zip(result, (parameter.grad for parameter in network.parameters()), strict=True):
        torch.testing.assert_close(one, other)
    assert len(captured._passes) == 1


@on_a_gpu
def test_methods_and_several_outputs_are_captured() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def features(self, images: torch.Tensor) -> torch.Tensor:
            return self.layer(images)

        def maps(self, images: torch.Tensor) -> list[torch.Tensor]:
            return [self.layer(images), 2 * images]

        def forward(self, images: torch.Tensor, *, auxiliary: bool = False) -> object:
            return (self.layer(images), None) if auxiliary else self.layer(images)

    network = Network().cuda()
    images = torch.randn(3, 4, device="cuda")
    captured = CapturedNetwork(network)
    logits, none = captured(images, auxiliary=True)
    assert none is None
    torch.testing.assert_close(logits, network(images))
    for _ in range(2):  # a pass is not captured while a backward pass through another is possible
        torch.testing.assert_close(captured.features(images), network.layer(images))
        del logits
        logits = captured(images, auxiliary=True)[0]
        assert logits.requires_grad
    assert [each.method for each in captured._passes] == ["forward", "features"]
    recorded_module.capture_method_(network, "maps")
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            first, second = network.maps(images)
            torch.testing.assert_close(first, network.layer(images))
            torch.testing.assert_close(second, 2 * images)
    recorded_module.capture_calls_(network)
    with torch.no_grad():
        torch.testing.assert_close(network(images), network.layer(images))
