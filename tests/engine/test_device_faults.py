"""A device that has too little memory or fails: one line, nothing lost, and the same run afterwards, bit for bit.

Here the faults are raised where a device would raise them; `tests/reliability/test_gpu_faults.py` makes them on one.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from patchloom.data.images.image_batch import ImageBatch
from patchloom.engine.loop import train
from patchloom.runs.checkpoints import CheckpointFolder, find_checkpoint
from patchloom_runtime.errors import DeviceError, ResourceError
from tests.engine.test_resume import assert_equal_runs, without_times
from tests.engine.toys import STEPS, ByFunction, ToyImages, classify, evaluator, make_run, network

NO_MEMORY = {
    "CUDA": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "driver": torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
    "CPU": RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
}
FAILED = {
    "launch": torch.AcceleratorError("CUDA error: unspecified launch failure\nSearch for `cudaErrorLaunchFailure'"),
    "assert": RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later"),
    "memory": RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    "cuDNN": RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
}
AT = STEPS + 2  # updates before the fault


class Faulty(ByFunction):
    """`classify`, with an error once in forward, backward or update number `AT`."""

    def __init__(self, error: Exception, where: str) -> None:
        super().__init__(classify)
        self._error, self._where = error, where

    def __call__(self, model: nn.Module, batch: Any, *, epoch: int, step: int) -> dict[str, Tensor]:
        values = super().__call__(model, batch, epoch=epoch, step=step)
        if epoch * STEPS + step == AT:
            if self._where == "forward":
                raise self._error
            if self._where == "backward":
                values["loss"].register_hook(self._raise)
        return values

    def before_update(self, model: nn.Module, step: int) -> None:
        super().before_update(model, step)
        if self._where == "update" and step == AT:
            raise self._error

    def _raise(self, _: Tensor) -> None:
        raise self._error


class FaultyImages(ToyImages):
    """Pictures that cannot be copied to the device at update number `AT`."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[ImageBatch]:
        for step, batch in enumerate(super().epoch(epoch, start_step), start_step):
            if epoch * STEPS + step == AT:
                raise self._error
            yield batch


def faulty_fields(error: Exception, where: str) -> dict[str, Any]:
    if where == "copy":
        return {"loader": FaultyImages(error)}
    if where == "evaluation":
        calls = iter(range(99))

        def second_fails(model: nn.Module) -> Iterator[tuple[str, float]]:
            result = dict(evaluator(model))
            if next(calls) == 1:
                raise error
            yield from result.items()

        return {"evaluators": [second_fails]}
    return {"objective": Faulty(error, where)}


def assert_resumes(folder: Path, expected: Path, step: int, **fields: Any) -> None:
    """From `step` to the same bytes as the run in `expected`, which nothing happened to."""
    whole = make_run(expected, **fields)
    train(whole)
    result = find_checkpoint(folder)
    assert (result.snapshot.step if result else 0) == step
    continued = make_run(folder, **fields)
    train(continued, result and result.snapshot)
    assert_equal_runs(whole, continued)
    assert without_times(folder) == without_times(expected)
    assert (folder / "weights.safetensors").read_bytes() == (expected / "weights.safetensors").read_bytes()


@pytest.mark.parametrize("where", ["forward", "backward", "copy", "evaluation"])
def test_without_memory_every_step_is_saved(tmp_path: Path, where: str) -> None:
    fields: dict[str, Any] = {"accumulate": 2, "clip_norm": 1.0}
    with pytest.raises(ResourceError, match=r"\bcpu\b") as raised:
        train(make_run(tmp_path / "a", **fields | faulty_fields(NO_MEMORY["CUDA"], where)))
    assert type(raised.value) is ResourceError
    assert "--micro-batches 4" in str(raised.value) or where == "evaluation"
    step = 2 * STEPS if where == "evaluation" else AT
    assert_resumes(tmp_path / "a", tmp_path / "whole", step, **fields)


@pytest.mark.parametrize("name", NO_MEMORY)
def test_a_lack_of_memory_is_known_by_whoever_says_it(name: str) -> None:
    with pytest.raises(ResourceError, match="--micro-batches 2") as raised:
        train(make_run(objective=Faulty(NO_MEMORY[name], "forward")))
    assert not isinstance(raised.value, DeviceError)


def test_half_an_update_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ResourceError):
        train(make_run(tmp_path / "a", **faulty_fields(NO_MEMORY["CUDA"], "update")))
    assert_resumes(tmp_path / "a", tmp_path / "whole", 0)


def test_a_step_that_changed_the_networks_statistics_is_not_saved(tmp_path: Path) -> None:
    def with_statistics() -> nn.Module:
        model = network()
        model.register_buffer("seen", torch.zeros(()))
        return model

    fields = faulty_fields(NO_MEMORY["CUDA"], "forward")
    with pytest.raises(ResourceError):
        train(make_run(tmp_path, model=with_statistics(), **fields))
    assert find_checkpoint(tmp_path) is None


def test_a_second_lack_of_memory_while_saving_leaves_the_first_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: object) -> None:
        raise NO_MEMORY["CUDA"]

    monkeypatch.setattr(CheckpointFolder, "save", save)
    with pytest.raises(ResourceError, match="--micro-batches"):
        train(make_run(tmp_path, objective=Faulty(NO_MEMORY["CUDA"], "forward")))


@pytest.mark.parametrize("where", ["forward", "backward", "update", "copy", "evaluation"])
def test_a_failed_device_leaves_the_last_checkpoint(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {"save_every_s": 0.0}
    saved: list[int] = []
    save = CheckpointFolder.save

    def counted(self: CheckpointFolder, snapshot: Any, processes: Any) -> None:
        saved.append(snapshot.step)
        save(self, snapshot, processes)

    monkeypatch.setattr(CheckpointFolder, "save", counted)
    with pytest.raises(DeviceError) as raised:
        train(make_run(tmp_path / "a", **fields | faulty_fields(FAILED["launch"], where)))
    step = 2 * STEPS if where == "evaluation" else AT
    assert raised.value.exit_code == 6
    for fact in ("cpu", str(step), "unspecified launch failure"):
        assert fact in str(raised.value)
    assert "Search for" not in str(raised.value)
    assert saved == list(range(1, step + 1))  # and nothing after the fault
    assert_resumes(tmp_path / "a", tmp_path / "whole", step, **fields)


@pytest.mark.parametrize("name", FAILED)
def test_a_failure_is_known_by_whoever_says_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(DeviceError, match=re.escape(str(FAILED[name]).splitlines()[0])):
        train(make_run(tmp_path, objective=Faulty(FAILED[name], "forward")))
    assert find_checkpoint(tmp_path) is None


def test_a_device_that_fails_while_it_is_saved_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from patchloom.runs import checkpoints

    packed, write_new = checkpoints.packed, checkpoints.write_new
    written: list[Path] = []

    def counted(path: Path, data: bytes) -> str:
        written.append(path)
        return write_new(path, data)

    def copied(tensors: dict[str, Tensor], *rest: Any) -> bytes:
        saves = sum(path.name == "weights.safetensors" for path in written)
        if saves == 4 and written[-1].name == "weights.safetensors":  # after the first file of the fourth checkpoint
            raise FAILED["launch"]
        return packed(tensors, *rest)

    monkeypatch.setattr(checkpoints, "write_new", counted)
    monkeypatch.setattr(checkpoints, "packed", copied)
    with pytest.raises(DeviceError, match=r"\b3\b"):
        train(make_run(tmp_path / "a", save_every_s=0.0))
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "a" / "checkpoints").iterdir() if path.name.startswith(".")] == []
    assert_resumes(tmp_path / "a", tmp_path / "whole", 3, save_every_s=0.0)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shapes do not match"), dist.DistBackendError("NCCL error in: a.cpp:5, CUDA error of rank 1")],
)
def test_any_other_error_stays_what_it_is(error: Exception) -> None:
    """That of NCCL too: `Processes.ranks_watched` asks which rank is gone."""
    with pytest.raises(RuntimeError) as raised:
        train(make_run(objective=Faulty(error, "forward")))
    assert raised.value is error
