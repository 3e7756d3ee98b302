"""The mean of the last epochs' weights, also where the run is interrupted."""

import torch
from torch import nn

from patchloom.engine.epoch_average import EpochAverage

STEPS = 3


def trained(average: EpochAverage, network: nn.Module, steps: range) -> None:
    """Weights that are another number after every step."""
    for step in steps:
        nn.init.constant_(network.weight, float(step))
        network.count.fill_(step)
        average.update(step)


def network() -> nn.Module:
    made = nn.Linear(2, 2, bias=False)
    made.register_buffer("count", torch.tensor(0))
    return made


def test_it_is_the_mean_after_the_last_epochs() -> None:
    model = network()
    average = EpochAverage(model, 3, STEPS)
    trained(average, model, range(STEPS))
    assert average.model is None  # one epoch is the model itself
    trained(average, model, range(STEPS, 5 * STEPS + 1))
    # epochs 3, 4 and 5 end with steps 8, 11 and 14; step 15 is of epoch 6
    assert torch.equal(average.model.weight, torch.full((2, 2), (8 + 11 + 14) / 3))
    assert average.model.count == 14


def test_it_goes_on_exactly() -> None:
    torch.manual_seed(0)
    whole, broken = network(), network()
    one, other = (EpochAverage(each, 2, 1) for each in (whole, broken))
    for step in range(4):
        with torch.no_grad():
            whole.weight.copy_(torch.randn(2, 2))
            broken.weight.copy_(whole.weight)
        one.update(step)
        remaining = {name: tensor.clone() for name, tensor in other.tensors().items()}
        other = EpochAverage(broken, 2, 1)
        other.restore(remaining, {})
        other.update(step)
    assert torch.equal(one.model.weight, other.model.weight)
    assert not torch.equal(one.model.weight, whole.weight)
