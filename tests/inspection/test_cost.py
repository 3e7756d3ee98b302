"""Counted and measured costs of networks."""

import pytest
import timm
import torch
from torch import nn

import patchloom
from patchloom.models.cost import human, measure
from patchloom_runtime.errors import UsageError
from tests.networks import small


def test_a_linear_layer_by_hand() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3 * 4 * 4, 10)

        def forward(self, x):
            return torch.relu(self.linear(x.flatten(1)))

    cost = patchloom.cost(Flat(), 4)
    assert (cost.parameters, cost.multiply_adds, cost.elementwise) == (490, 480, 10)
    assert cost.operations == 490


def test_a_network_of_timm_counts_the_same() -> None:
    with torch.device("meta"):
        theirs = timm.create_model("resmlp_12_224")
        ours = patchloom.create_model("resmlp_s12")
    assert patchloom.cost(theirs, 224).multiply_adds == patchloom.cost(ours).multiply_adds


def test_counting_leaves_the_network_as_it_was() -> None:
    network = small("smlpnet_t").train()
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    patchloom.cost(network)
    assert network.training
    assert all(torch.equal(tensor, before[key]) for key, tensor in network.state_dict().items())


def test_another_resolution_costs_more() -> None:
    network = small("patchconvnet_s60")
    assert patchloom.cost(network, 128).multiply_adds > 3.5 * patchloom.cost(network, 64).multiply_adds


def test_a_foreign_network_needs_the_image_size() -> None:
    with pytest.raises(UsageError) as error:
        patchloom.cost(nn.Linear(2, 2))
    assert "Linear" in str(error.value)
    assert "image_size" in str(error.value)


def test_measuring_reports_the_best_of_the_sweep() -> None:
    speeds = measure({"a": small("resmlp_s12"), "b": small("mixer_b16")}, batch_sizes=(1, 2), seconds=0.02)
    assert set(speeds) == {"a", "b"}
    assert all(speed.images_per_second > 0 and speed.batch_size in (1, 2) for speed in speeds.values())


def test_counts_as_the_papers_print_them() -> None:
    assert [human(n) for n in (15_350_872, 3.01e9, 23.02e9, 11_956_264, 28_550)] == [
        "15.4 M",
        "3.01 G",
        "23.0 G",
        "12.0 M",
        "28.6 k",
    ]
