"""A run over shards in a bucket has the weights of one over local shards, through faults, a stop and a resume."""

import signal
from pathlib import Path
from typing import Any

import pytest

import patchloom
from patchloom.data.packing import pack
from patchloom.engine.signals import Stopped

OPTIONS: dict[str, Any] = {
    "model": "resmlp_s12",
    "set": {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 8},
    "size": 32,
    "epochs": 2,
    "batch": 8,
    "device": "cpu",
    "workers": 0,
}


class Interrupt(patchloom.Callback):
    """Stops the run after some steps, once."""

    after = 0

    def on_step(self, state: Any) -> None:
        if state.step == Interrupt.after:
            Interrupt.after = 0
            signal.raise_signal(signal.SIGINT)


def test_a_run_over_a_bad_network_equals_a_local_one(bucket, photos, tmp_path: Path) -> None:
    pack(photos, out=tmp_path / "shards")
    url = bucket.upload(tmp_path / "shards", "flowers")
    here = patchloom.train(str(tmp_path / "shards"), out=str(tmp_path / "here"), callbacks=[Interrupt()], **OPTIONS)
    bucket.proxy.faults.extend(["500", "cut", "", "503", "slow", "cut"])
    Interrupt.after = 7
    with pytest.raises(Stopped):
        patchloom.train(url, out=str(tmp_path / "there"), callbacks=[Interrupt()], **OPTIONS)
    there = patchloom.train(url, out=str(tmp_path / "there"), callbacks=[Interrupt()], **OPTIONS)
    assert not bucket.proxy.faults
    assert there.metrics == here.metrics
    weights = [(tmp_path / run / "weights.safetensors").read_bytes() for run in ("here", "there")]
    assert weights[0] == weights[1]
