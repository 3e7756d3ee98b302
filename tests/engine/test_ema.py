"""The average of the weights follows its formula."""

import torch
from torch import nn

from patchloom.engine.ema import Ema


def test_average_follows_the_formula_for_weights_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    average = Ema(model, 0.8)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(40):
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.add_(1) if tensor.dtype == torch.int64 else tensor.copy_(torch.randn_like(tensor))
        average.update(step)
        decay = min(0.8, (1 + step) / (10 + step))
        for name, value in model.state_dict().items():
            floating = value.is_floating_point()
            expected[name] = decay * expected[name] + (1 - decay) * value if floating else value.clone()
    for name, value in average.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], msg=name)
    assert average.decay_at(40) == 0.8


def test_average_does_not_learn_and_does_not_disturb_the_model() -> None:
    model = nn.Linear(3, 2).train()
    average = Ema(model, 0.9)
    before = model.weight.clone()
    average.update(0)
    assert not any(p.requires_grad for p in average.model.parameters())
    assert not average.model.training
    assert model.training
    assert torch.equal(model.weight, before)
