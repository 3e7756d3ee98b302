"""Apple's GPUs, simulated: which device is chosen, and what it does without, as no test here runs on one."""

from unittest.mock import Mock

import pytest
import torch

from patchloom.engine.distribution import Processes
from patchloom.engine.state import random_state, set_random_state
from patchloom.errors import UsageError
from patchloom.machine import device_kind, resolve_device, why_device, widest_float
from patchloom.training import run

MPS = torch.device("mps")


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


def test_auto_prefers_cuda_to_mps_and_mps_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = set()
    for cuda, mps, expected in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: mps)
        assert resolve_device("auto") == expected
        reasons.add(why_device(expected))
    assert len(reasons) == 3


def test_mps_is_accepted_where_it_is(apple: None) -> None:
    assert device_kind("mps") == device_kind("mps:0") == device_kind(None) == "mps"
    with pytest.raises(UsageError, match="mps:1"):
        device_kind("mps:1")


def test_mps_is_refused_where_it_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"mps.*cpu") as error:
        resolve_device("mps")
    assert "\n" not in str(error.value)


def test_the_plan_says_why_a_device_was_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    lines: list[str] = []
    settings = run.TrainingSettings(data="digits", out=tmp_path / "run", epochs=1, workers=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run.run_training(settings, dry_run=True, say=lines.append)
    (machine,) = [line for line in lines if line.startswith("machine")]
    assert why_device("cpu") in machine


@pytest.mark.parametrize(("macos", "precision"), [(True, "bf16"), (False, "fp32")])
def test_precision_falls_back(apple: None, monkeypatch: pytest.MonkeyPatch, macos: bool, precision: str) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_: macos)
    assert Processes(device="mps").precision == "fp32"
    assert Processes("bf16", device="mps").precision == precision
    with pytest.raises(UsageError, match=r"fp16.*mps"):
        Processes("fp16", device="mps")


def test_it_trains_in_one_process(apple: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(UsageError, match="one process"):
        Processes(device="mps")


def test_gradients_are_clipped_one_by_one(apple: None) -> None:
    """torch raises for foreach=True on MPS; here the tensors are on the CPU."""
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), 8.0)
    clip = Mock(wraps=torch.nn.utils.clip_grad_norm_)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
        Processes(device="mps").update(torch.optim.SGD([weight], lr=1.0), clip_norm=1.0)
    assert clip.call_args.kwargs["foreach"] is not True
    torch.testing.assert_close(weight.detach(), torch.full((4,), 0.5))


def test_its_generator_is_saved_and_restored(apple: None, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.arange(3, dtype=torch.uint8)]
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda _: states[-1])
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state, _: states.append(state))
    saved = random_state(MPS)
    assert torch.equal(saved["mps"], states[0])
    states.append(torch.zeros(3, dtype=torch.uint8))
    set_random_state(saved, MPS)
    assert torch.equal(states[-1], states[0])
    with Processes(device="mps").rng_preserved():
        states.append(torch.ones(3, dtype=torch.uint8))
    assert torch.equal(states[-1], states[0])


def test_it_lacks_float64() -> None:
    assert widest_float(MPS) == torch.float32
    assert widest_float(torch.device("cpu")) == widest_float(None) == torch.float64
