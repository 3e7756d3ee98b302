"""Peak memory, counted by hand."""

from typing import Any

import pytest
import torch
from torch import nn

from patchloom.models import peak_memory as memory
from patchloom.models.bench import bench
from patchloom.models.cost import measure, measure_largest, tradeoffs
from patchloom.models.peak_memory import MIB, LiveBytes, largest_batch, memory_by_size, peak_mem_mib
from patchloom_runtime.errors import ResourceError, UsageError
from tests.networks import images, small


def test_a_small_network_by_hand() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    weights, inputs, hidden = 10 * 20 + 20 + 20 * 5 + 5, 7 * 10, 7 * 20
    # The widest moment: the hidden layer before and after ReLU.
    assert peak_mem_mib(model, torch.zeros(7, 10)) * MIB == 4 * (weights + inputs + 2 * hidden)
    assert peak_mem_mib(model.half(), torch.zeros(7, 10).half()) * MIB == 2 * (weights + inputs + 2 * hidden)


def test_an_operation_in_place_takes_nothing_more() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(inplace=True), nn.Linear(20, 5))
    # While the second layer works, its output is alive together with the hidden layer.
    expected = 4 * (325 + 7 * 10 + 7 * 20 + 7 * 5)
    assert peak_mem_mib(model, torch.zeros(7, 10)) * MIB == expected


def test_views_count_once_and_freed_tensors_do_not_count() -> None:
    tensor = torch.zeros(100)
    with LiveBytes([tensor, tensor[:50]]) as live:
        assert live.bytes == 400
        made = tensor + 1
        view = made.view(10, 10).T
        assert live.bytes == 800
        del made
        assert live.bytes == 800
        del view
        assert live.bytes == 400
        a, b = tensor.double(), torch.zeros(5, dtype=torch.uint8)
        assert live.bytes == 400 + 800 + 5
        del a, b
    assert (live.bytes, live.peak) == (400, 1205)


def test_equal_tensors_are_not_one() -> None:
    with LiveBytes() as live:
        pair = torch.zeros(4), torch.zeros(4)
        assert live.bytes == 32
    del pair


def test_a_convnet_grows_with_the_surface_and_talking_heads_with_its_square() -> None:
    """Thesis figure 5.3 with small networks, without the memory of the weights."""

    def growth(name: str, **options) -> float:
        taken = []
        for size in (128, 256):
            network = small(name, image_size=size, **options)
            weights = sum(p.numel() * 4 for p in (*network.parameters(), *network.buffers()))
            taken.append(peak_mem_mib(network, images(network, batch=1)) * MIB - weights)
        return taken[1] / taken[0]

    assert growth("patchconvnet_s60") == pytest.approx(4, rel=0.05)
    assert growth("cait_xxs24") > 8


@pytest.mark.parametrize(("room", "largest"), [(0, 0), (1, 1), (7, 7), (8, 8), (11, 11), (100, 96), (127, 120)])
def test_the_largest_batch_is_known_to_an_eighth(room: int, largest: int, monkeypatch) -> None:
    tried = []

    def full(model: nn.Module, inputs: torch.Tensor) -> float:
        tried.append(len(inputs))
        if len(inputs) > room:
            raise torch.OutOfMemoryError
        return 1.0

    monkeypatch.setattr(memory, "peak_mem_mib", full)
    assert largest_batch(nn.Linear(2, 2), (2,)) == largest
    assert len(tried) <= 12


def test_the_largest_batch_stays_below_a_limit() -> None:
    model = nn.Linear(1024, 1024, bias=False)  # 4 MiB, and 8 KiB per input with its output
    assert largest_batch(model, (1024,), limit_mib=5) == 128
    assert largest_batch(model, (1024,), limit_mib=4) == 0


def test_the_largest_batch_is_measured_for_each_network() -> None:
    networks = {"small": small("resmlp_s12"), "large": small("resmlp_s12", image_size=64)}
    limit = 1.2 * max(peak_mem_mib(network, images(network, batch=2)) for network in networks.values())
    speeds = measure_largest(networks, seconds=0.01, limit_mib=limit)
    for name, network in networks.items():
        shape = (3, *network.config.image_size)
        assert speeds[name].batch_size == largest_batch(network, shape, limit)
        assert peak_mem_mib(network, torch.zeros(speeds[name].batch_size, *shape)) <= limit
    assert speeds["small"].batch_size > speeds["large"].batch_size >= 2
    with pytest.raises(ResourceError) as error:
        measure_largest(networks, seconds=0.01, limit_mib=0.01)
    assert "small" in str(error.value)
    assert "0.01 MiB" in str(error.value)


@pytest.mark.parametrize(
    "options", [{"batches": "largest"}, {"limit_mib": 100}, {"batches": "largest", "limit_mib": 100, "compile": True}]
)
def test_the_largest_batch_on_a_cpu_needs_a_limit(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as error:
        bench(["deit_ti"], device="cpu", size=32, **options)
    assert "limit_mib" in str(error.value)


def test_memory_by_size_and_out_of_memory(monkeypatch) -> None:
    result = memory_by_size(lambda size: small("resmlp_s12", image_size=size), [32, 64], batch=2)
    network = small("resmlp_s12", image_size=64)
    assert result[64] == peak_mem_mib(network, torch.zeros(2, 3, 64, 64))
    assert result[32] < result[64]
    measured = memory.peak_mem_mib

    def full(model: nn.Module, inputs: torch.Tensor) -> float:
        if inputs.shape[-1] > 32:
            raise torch.OutOfMemoryError
        return measured(model, inputs)

    monkeypatch.setattr(memory, "peak_mem_mib", full)
    assert memory_by_size(lambda size: small("resmlp_s12", image_size=size), [32, 64], batch=2) == result | {64: None}
    with pytest.raises(memory.ResourceError) as error:
        memory_by_size(lambda size: small("resmlp_s12", image_size=size), [64], batch=2)
    assert "2" in str(error.value)
    assert "64" in str(error.value)


def test_accuracy_is_listed_with_cost() -> None:
    networks = {"a": small("resmlp_s12"), "b": small("mixer_b16", image_size=64)}
    (a, b) = tradeoffs(networks, {"a": 71.0, "b": 69.5}, batch_sizes=(2,), seconds=0.01)
    assert (a.name, a.top1, b.top1, a.batch_size) == ("a", 71.0, 69.5, 2)
    assert b.parameters == sum(p.numel() for p in networks["b"].parameters())
    assert a.peak_mem_mib == peak_mem_mib(networks["a"], torch.zeros(2, 3, 32, 32))


def test_a_compiled_network_on_a_cpu_is_not_watched() -> None:
    compiled = torch.compile(small("resmlp_s12"), backend="eager")
    assert measure({"a": compiled}, image_size=32, batch_sizes=(1,), seconds=0.01)["a"].peak_mem_mib is None
