"""What is on disk: written whole or not at all, read only when whole, and enough alone."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from patchloom import disk
from patchloom.disk import atomic_write, locked
from patchloom.engine.state import Snapshot
from patchloom.recipes import get_recipe
from patchloom.runs import checkpoints
from patchloom.runs.checkpoints import find_checkpoint, load_checkpoint, save_checkpoint
from patchloom.runs.config import Preprocessing, read_run_files, write_run_files
from patchloom.runs.weights import load_network, read_weights, save_weights
from patchloom_runtime.errors import CheckpointError, NumericalError, ResourceError, UsageError
from tests.messages import missing, refused
from tests.networks import images, small

PREPROCESSING = Preprocessing((0.5, 0.4, 0.3), (0.2, 0.2, 0.1), (32, 32), 0.9)


def snapshot(step: int) -> Snapshot:
    generator = torch.Generator().manual_seed(step)
    weights = {"a": torch.randn(3, 4, generator=generator), "b.count": torch.tensor(step)}
    return Snapshot({"weights": weights, "random-0": {"torch": torch.get_rng_state()}}, {"progress": {"step": step}})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_checkpoint_round_trip_is_exact(tmp_path: Path) -> None:
    saved = snapshot(7)
    loaded = load_checkpoint(save_checkpoint(tmp_path, saved))
    assert loaded.values == saved.values
    for part, tensors in saved.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(loaded.tensors[part][name], tensor)
            assert loaded.tensors[part][name].dtype == tensor.dtype


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    for step in (5, 12, 100_000_000, 30):
        save_checkpoint(tmp_path, snapshot(step))
    assert names(tmp_path) == ["step-00000030", "step-100000000"]


def test_a_step_saved_again_does_not_touch_the_first(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path, snapshot(5))
    inode = first.stat().st_ino
    second = save_checkpoint(tmp_path, snapshot(5))
    assert first.stat().st_ino == inode
    found = find_checkpoint(tmp_path)
    assert found is not None
    assert found.path == second


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path) is None


def empty(file: Path) -> None:
    file.write_bytes(b"")


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)


DAMAGE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "empty weights": ("weights.safetensors", empty),
    "truncated weights": ("weights.safetensors", truncate),
    "flipped bit": ("weights.safetensors", flip),
    "no weights": ("weights.safetensors", Path.unlink),
    "truncated state": ("state.json", truncate),
    "no manifest": ("manifest.json", Path.unlink),
    "half a manifest": ("manifest.json", truncate),
    "empty manifest": ("manifest.json", empty),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path: Path, case: str) -> None:
    file, damage = DAMAGE[case]
    save_checkpoint(tmp_path, snapshot(1))
    newest = save_checkpoint(tmp_path, snapshot(2))
    damage(newest / file)
    found = find_checkpoint(tmp_path)
    assert found is not None
    assert found.snapshot.step == 1
    assert missing(found.notes[0], "step-00000002", file) == []
    shutil.rmtree(found.path)
    with refused(CheckpointError, tmp_path, "step-00000002") as error:
        find_checkpoint(tmp_path)
    assert error.value.exit_code == 4


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, snapshot(1))
    save_weights(tmp_path, snapshot(1).tensors["weights"], {"step": 1})
    rng = random.Random(0)
    for file in [*path.iterdir(), tmp_path / "weights.safetensors"]:
        whole = file.read_bytes()
        for _ in range(60):
            data = bytearray(whole)
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
            if file.parent == tmp_path:
                # Bits of spaces and notes may flip without harm: what is read is right or nothing is.
                _assert_right_or_refused(file)
            else:
                with pytest.raises(CheckpointError, match=file.name):
                    load_checkpoint(path)
        file.write_bytes(whole)


def _assert_right_or_refused(file: Path) -> None:
    try:
        weights = read_weights(file)
    except CheckpointError:
        return
    assert all(torch.equal(weights[name], value) for name, value in snapshot(1).tensors["weights"].items())


def test_a_newer_format_is_said(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, snapshot(1))
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with refused(CheckpointError, "manifest.json", 99, 1):
        load_checkpoint(path)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    bad = snapshot(2)
    bad.tensors["weights"]["a"][0, 0] = torch.nan
    save_checkpoint(tmp_path, snapshot(1))
    with refused(NumericalError, 2, "NaN"):
        save_checkpoint(tmp_path, bad)
    with pytest.raises(NumericalError):
        save_weights(tmp_path, bad.tensors["weights"], {})
    assert names(tmp_path) == ["step-00000001"]
    save_file(bad.tensors["weights"], tmp_path / "foreign.safetensors")
    with refused(CheckpointError, "foreign.safetensors", "NaN"):
        read_weights(tmp_path / "foreign.safetensors")


@pytest.mark.parametrize("after", range(4))
def test_a_full_disk_leaves_the_last_checkpoint_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    save_checkpoint(tmp_path, snapshot(1))
    write, calls = disk.write_new, []

    def full(path: Path, data: bytes) -> str:
        calls.append(path)
        if len(calls) > after:
            path.write_bytes(data[:10])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, data)

    for module in (checkpoints, disk):
        monkeypatch.setattr(module, "write_new", full)
    with refused(ResourceError, tmp_path) as error:
        save_checkpoint(tmp_path, snapshot(2))
    assert error.value.exit_code == 6
    assert names(tmp_path) == ["step-00000001"]
    with pytest.raises(ResourceError):
        atomic_write(tmp_path / "config.json", b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


def test_leftovers_of_a_killed_save_are_ignored_and_removed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, snapshot(1))
    leftover = tmp_path / "checkpoints" / ".step-00000002.tmp"
    leftover.mkdir()
    (leftover / "weights.safetensors").write_bytes(b"half")
    found = find_checkpoint(tmp_path)
    assert found is not None
    assert (found.snapshot.step, found.notes) == (1, [])
    save_checkpoint(tmp_path, snapshot(3))
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


@pytest.mark.slow
def test_killed_at_any_moment_the_newest_checkpoint_is_whole(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from pathlib import Path\n"
        "from patchloom.runs.checkpoints import save_checkpoint; from patchloom.engine.state import Snapshot\n"
        "step = int(sys.argv[2])\nprint('go', flush=True)\n"
        "while True:\n"
        "    step += 1\n"
        "    save_checkpoint(Path(sys.argv[1]),\n"
        "        Snapshot({'weights': {'a': torch.full((1_000_000,), step)}}, {'progress': {'step': step}}))\n"
    )
    rng, step = random.Random(0), 0
    for _ in range(10):
        with subprocess.Popen([sys.executable, "-c", script, tmp_path, str(step)], stdout=subprocess.PIPE) as process:
            assert process.stdout
            process.stdout.readline()
            try:
                process.wait(rng.uniform(0.05, 0.5))
            except subprocess.TimeoutExpired:
                process.kill()
        found = find_checkpoint(tmp_path)
        if found:
            assert not found.notes
            assert found.snapshot.step >= step
            assert found.snapshot.tensors["weights"]["a"].eq(found.snapshot.step).all()
            step = found.snapshot.step
    assert step > 0


def test_a_run_folder_is_enough_alone(tmp_path: Path) -> None:
    network = small("deit_s_distilled")
    recipe = get_recipe("deit_distilled", "deit_s_distilled")
    write_run_files(tmp_path, network, PREPROCESSING, recipe, ["cat", "dög", "…", "d", "e"], task="classification")
    save_weights(tmp_path, dict(network.state_dict()), {"step": 3})
    loaded, files = load_network(tmp_path)
    pictures = images(network)
    assert torch.equal(loaded(pictures), network(pictures))
    assert loaded.config == network.config
    assert files.labels == ("cat", "dög", "…", "d", "e")
    assert files.preprocessing == PREPROCESSING
    assert files.recipe == recipe


def test_weights_shared_by_two_names_are_stored(tmp_path: Path) -> None:
    tensor = torch.arange(4.0)
    save_weights(tmp_path, {"a": tensor, "b": tensor, "c": tensor[:2]}, {})
    read = read_weights(tmp_path / "weights.safetensors")
    assert torch.equal(read["a"], tensor)
    assert torch.equal(read["b"], tensor)
    assert torch.equal(read["c"], tensor[:2])


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    network = small("resmlp_s12")
    write_run_files(tmp_path, network, PREPROCESSING, get_recipe("resmlp"), [], task="classification")
    save_weights(tmp_path, dict(small("resmlp_s12", num_classes=7).state_dict()), {})
    with refused(CheckpointError, "classifier.weight", "(7, 16)", "(5, 16)"):
        load_network(tmp_path)


@pytest.mark.parametrize("content", [b"\x80\x04\x95pickle", b"PK\x03\x04zip", b"\xff" * 64])
def test_what_is_not_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "weights.safetensors").write_bytes(content)
    with refused(CheckpointError, tmp_path / "weights.safetensors"):
        read_weights(tmp_path / "weights.safetensors")


def test_a_config_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"format": 1, "network": "resmlp_s12"}')
    with refused(CheckpointError, "config.json", "options"):
        read_run_files(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_run_files(tmp_path)


def test_a_folder_that_cannot_be_written_is_an_error_of_use(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(UsageError, tmp_path / "file"):
        atomic_write(tmp_path / "file" / "config.json", b"")


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        refused(UsageError, os.getpid()),
        locked(tmp_path),
    ):
        pass
    with locked(tmp_path):
        pass
