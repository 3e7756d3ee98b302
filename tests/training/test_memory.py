"""Memory is counted before it is taken, and a batch is cut so that it fits."""

import re
from pathlib import Path

import pytest

from patchloom.machine import available_bytes
from patchloom.tasks.plan import TrainingSettings
from patchloom.training import memory, timing
from patchloom.training.memory import MemoryNeed, parts_that_fit
from patchloom.training.run import run_training
from patchloom_runtime.errors import ResourceError, UsageError

MIB = 2**20


def test_a_batch_is_cut_by_powers_of_two_until_it_fits() -> None:
    need = MemoryNeed(fixed=100, data=64, per_image=10.0)
    assert [parts_that_fit(need, 64, allowed) for allowed in (1000, 803, 500, 210)] == [1, 2, 2, 16]
    assert need.bytes(64, 16) == 100 + 64 + 40


def test_one_image_that_does_not_fit_says_what_to_do() -> None:
    with pytest.raises(ResourceError) as error:
        parts_that_fit(MemoryNeed(3 << 30, 0, float(1 << 30)), 64, 1 << 30)
    for fact in ("4.0 GiB", "--fit"):
        assert fact in str(error.value)
    with pytest.raises(ResourceError) as error:
        parts_that_fit(MemoryNeed(0, 2 << 30, 1 * MIB), 1024, 200 * MIB)
    for fact in ("1024", "2.0 GiB", "--batch"):
        assert fact in str(error.value)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8000),
        ({"memory.max": "max", "memory.current": "1", "memory.stat": ""}, 8000),
        ({"job/memory.max": "5000000", "job/memory.current": "4000000", "job/memory.stat": "inactive_file 1000"}, 1001),
    ],
)
def test_the_limits_of_version_2_control_groups_count(tmp_path: Path, files, expected) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/job\n")
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    found = available_bytes(tmp_path / "proc", tmp_path / "groups")
    assert found == (expected * 1024 if expected == 8000 else expected * 1000)


def test_the_limit_of_a_version_1_control_group_above_counts(tmp_path: Path) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable:    8000 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("4:memory:/a/b\n3:cpu:/\n")
    above = tmp_path / "groups" / "memory" / "a"
    above.mkdir(parents=True)
    (above / "memory.limit_in_bytes").write_text("300000\n")
    (above / "memory.usage_in_bytes").write_text("100000\n")
    (above / "memory.stat").write_text("total_inactive_file 50000\n")
    assert available_bytes(tmp_path / "proc", tmp_path / "groups") == 250_000


@pytest.fixture(autouse=True)
def quickly_measured(monkeypatch) -> None:
    monkeypatch.setattr(timing, "MEASURING_S", 0.0)


TINY = {"model.options.depth": 2, "model.options.dim": 32, "model.options.patch_size": 4}


def dry(tmp_path: Path, **changes) -> list[str]:
    said: list[str] = []
    values = {"recipe": "small_images", "epochs": 1, "batch": 64, "workers": 0, "device": "cpu", "changes": TINY}
    settings = TrainingSettings(data="shapes:count=80,size=32", out=str(tmp_path / "run"), **values | changes)
    run_training(settings, dry_run=True, say=said.append)
    return said


def test_a_batch_that_does_not_fit_is_cut_and_said(tmp_path, monkeypatch) -> None:
    needs = []
    whole = memory.parts_that_fit
    monkeypatch.setattr(memory, "parts_that_fit", lambda need, *_: needs.append(need) or 1)
    dry(tmp_path)
    # As much as a quarter of the batch needs; the first measurement of a process is a few bytes below the next.
    allowed = 1.01 * needs[0].bytes(64, 4) / memory.USED_SHARE
    monkeypatch.setattr(memory, "parts_that_fit", whole)
    monkeypatch.setattr(memory, "available_bytes", lambda: allowed)
    said = dry(tmp_path)
    assert any(re.search(r"\b64\b.*\b4 micro-batches\b", line) for line in said), said


def test_what_micro_batches_change_is_said(tmp_path) -> None:
    said = dry(tmp_path, recipe="grafit_small_images", model="timm:test_resnet", micro_batches=8, changes={})
    (with_statistics,) = [line for line in said if "micro-batches" in line]
    said = dry(tmp_path, micro_batches=8)
    (without,) = [line for line in said if "micro-batches" in line]
    for line in (with_statistics, without):
        assert re.search(r"\b64\b.*\b8 micro-batches\b", line)
    # Batch statistics are those of a micro-batch, which is said where the network has some.
    assert [len(re.findall(r"\b8\b", line)) for line in (with_statistics, without)] == [2, 1]


def test_more_micro_batches_than_images_are_refused(tmp_path) -> None:
    for micro_batches, limit in ((65, 64), (0, 1)):
        with pytest.raises(UsageError, match="--micro-batches") as error:
            dry(tmp_path, micro_batches=micro_batches)
        assert {str(micro_batches), str(limit)} <= set(re.findall(r"\b\d+\b", str(error.value)))


def test_timing_changes_neither_weights_nor_random_numbers(tmp_path, monkeypatch) -> None:
    """The batch is not cut either way, so the runs may differ by what timing leaves behind alone."""
    weights = []
    for there in (None, 1 << 40):
        monkeypatch.setattr(memory, "available_bytes", lambda there=there: there)
        changes = TINY | {"model.drop_path": 0.3}
        values = {"recipe": "small_images", "epochs": 1, "batch": 32, "workers": 0, "device": "cpu"}
        out = tmp_path / str(there)
        run_training(TrainingSettings(data="shapes:count=80,size=32", out=str(out), changes=changes, **values), say=str)
        weights.append((out / "weights.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_the_need_grows_with_the_network(tmp_path, monkeypatch) -> None:
    needs = []
    monkeypatch.setattr(memory, "parts_that_fit", lambda need, *_: needs.append(need) or 1)
    for dim in (32, 64):
        dry(tmp_path, changes=TINY | {"model.options.dim": dim})
    small, large = needs
    assert 1.7 * small.per_image < large.per_image < 2.5 * small.per_image
    assert 0 < small.data == large.data
