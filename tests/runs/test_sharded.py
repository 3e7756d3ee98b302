"""Checkpoints that several processes write together, each its parts of the weights."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from patchloom.engine.distribution import Processes, whole
from patchloom.engine.ema import Ema
from patchloom.engine.loop import train
from patchloom.engine.state import capture, restore
from patchloom.runs import checkpoints, sharded
from patchloom.runs.checkpoints import CheckpointFolder, find_checkpoint, load_checkpoint, read_checkpoint
from patchloom.runs.sharded import TensorFile
from patchloom.runs.weights import read_weights, save_weights
from patchloom_runtime.errors import CheckpointError, PatchloomError
from tests.engine.toys import make_run, network
from tests.forked import forked_ranks


def run_of(folder: Path, processes: Processes, *, shards: bool = True, **fields: Any) -> Any:
    model = network(drop_path=0.0)
    average = Ema(model, 0.9)
    if shards:
        processes.shard(model, average.model)
    fields = {"saver": CheckpointFolder(folder), "epochs": 1, **fields}
    return make_run(folder, processes=processes, model=model, average=average, **fields)


def ranks(world: int, work: Any) -> list[tuple[int | None, str]]:
    def one() -> None:
        try:
            work(Processes("fp32", device="cpu", answer_within_s=60))
        except PatchloomError as error:
            print(error, flush=True)
            sys.exit(error.exit_code)
        except RuntimeError as error:
            print(f"broken connection: {error}", flush=True)
            sys.exit(9)

    processes = forked_ranks(one, world)
    outputs = [process.communicate(timeout=120) for process in processes]
    return [(process.returncode, "".join(output)) for process, output in zip(processes, outputs, strict=True)]


def saved_by(world: int, folder: Path) -> None:
    assert {code for code, _ in ranks(world, lambda processes: train(run_of(folder, processes)))} == {0}


def test_four_processes_write_what_two_and_one_read(tmp_path: Path) -> None:
    saved_by(4, tmp_path)
    found = find_checkpoint(tmp_path, read_checkpoint)
    assert found is not None
    files = {path.name for path in found.path.iterdir()}
    assert {f"shard-{rank:05d}.safetensors" for rank in range(4)} <= files
    assert not {"weights.safetensors", "ema.safetensors", "optimizer.safetensors"} & files - {"optimizer.safetensors"}
    rows = [load_file(found.path / f"shard-0000{rank}.safetensors")["weights/classifier.weight"] for rank in range(4)]
    assert [len(each) for each in rows] == [1, 1, 1, 0]  # 3 classes
    assert torch.equal(torch.cat(rows), found.snapshot.tensors["weights"]["classifier.weight"])

    alone = make_run(model=network(drop_path=0.0), ema_decay=0.9, epochs=1)
    restore(alone, found.snapshot)
    for name, value in alone.model.state_dict().items():
        assert torch.equal(found.snapshot.tensors["weights"][name], value), name

    def read_by_two(processes: Processes) -> None:
        run = run_of(tmp_path / "none", processes)
        restore(run, found.snapshot)
        for part, named in capture(run, restore(run, found.snapshot)[0]).tensors.items():
            for name, value in named.items():
                if not part.startswith("random"):
                    assert torch.equal(whole(value), found.snapshot.tensors[part][name]), (part, name)

    assert [code for code, _ in ranks(2, read_by_two)] == [0, 0]


def test_a_process_killed_while_saving_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    saved_by(2, tmp_path)
    before = find_checkpoint(tmp_path)
    assert before is not None

    def dies(processes: Processes) -> None:
        write = TensorFile.write

        def killed(self: TensorFile, name: str, tensor: torch.Tensor) -> memoryview:
            data = write(self, name, tensor)
            if processes.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)  # after the first tensor
            return data

        found = find_checkpoint(tmp_path, read_checkpoint)
        assert found is not None
        TensorFile.write = killed  # type: ignore[method-assign]
        with processes.ranks_watched():
            train(run_of(tmp_path, processes, epochs=2), found.snapshot)

    (code, said), (killed_code, _) = ranks(2, dies)
    assert killed_code == -signal.SIGKILL
    assert code == 6, said
    assert "rank 1" in said
    after = find_checkpoint(tmp_path, read_checkpoint)
    assert after is not None
    assert after.path == before.path
    assert not after.notes
    for part, named in before.snapshot.tensors.items():
        for name, value in named.items():
            assert torch.equal(after.snapshot.tensors[part][name], value), (part, name)

    def continues(processes: Processes) -> None:
        found = find_checkpoint(tmp_path, read_checkpoint)
        assert found is not None
        train(run_of(tmp_path, processes, epochs=2), found.snapshot)

    assert {code for code, _ in ranks(2, continues)} == {0}
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-00000005", "step-00000010"}


def test_an_error_of_one_process_is_that_of_all_and_nothing_is_left(tmp_path: Path, monkeypatch) -> None:
    def full(processes: Processes) -> None:
        if processes.rank == 1:

            def write(self: TensorFile, name: str, tensor: torch.Tensor) -> memoryview:
                raise OSError(28, "No space left on device")

            TensorFile.write = write  # type: ignore[method-assign]
        run = run_of(tmp_path, processes, metric=None, evaluators=[])
        run.saver.save_weights = lambda *_: None
        train(run)

    for code, said in ranks(2, full):
        assert code == 6, said
        assert str(tmp_path / "checkpoints") in said
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_missing_or_damaged_part_is_found(tmp_path: Path) -> None:
    saved_by(2, tmp_path)
    found = find_checkpoint(tmp_path)
    assert found is not None
    shard = found.path / "shard-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match="shard-00001"):
        load_checkpoint(found.path)
    shard.unlink()
    with pytest.raises(CheckpointError, match="shard-00001"):
        load_checkpoint(found.path)


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tensors = {"shard-00000": {"weights/a": torch.ones(2, 3)}, "shard-00001": {"weights/a": torch.ones(1, 3)}}
    for shapes, world in (({"weights/a": [4, 3]}, 2), ({"weights/b": [3, 3]}, 2), ({"weights/a": [3, 3]}, 3)):
        copies = {name: dict(named) for name, named in tensors.items()}
        with pytest.raises(CheckpointError, match=r"weights/"):
            sharded.join_shards(copies, shapes, world, tmp_path)
    sharded.join_shards(tensors, {"weights/a": [3, 3]}, 2, tmp_path)
    assert torch.equal(tensors["weights"]["a"], torch.ones(3, 3))


def test_a_file_written_tensor_by_tensor_is_a_safetensors_file(tmp_path: Path) -> None:
    tensors = {
        "b.weight": torch.randn(5, 3),
        "a": torch.arange(7),
        "half": torch.randn(3, 2).bfloat16(),
        "none": torch.zeros(0, 4),
        "flag": torch.tensor(True),
    }
    save_weights(tmp_path, tensors, {"step": 3})
    expected = read_weights(tmp_path / "weights.safetensors")
    header = json.loads((tmp_path / "weights.safetensors").read_bytes()[8:].split(b"}}", 1)[0].decode() + "}}")
    facts = json.loads(header["__metadata__"]["patchloom"])
    sha256 = facts.pop("sha256")
    file = TensorFile(tmp_path / "streamed.safetensors", tensors, facts)
    for name in sorted(tensors):
        file.write(name, tensors[name])
    file.close(sha256)
    streamed = read_weights(tmp_path / "streamed.safetensors")
    assert streamed.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(streamed[name], value)
        assert streamed[name].dtype == value.dtype


def test_gathered_weights_are_those_of_the_run(tmp_path: Path) -> None:
    saved_by(2, tmp_path)
    found = find_checkpoint(tmp_path)
    assert found is not None
    best = found.snapshot.values["progress"]["best_weights"]
    if found.snapshot.values["progress"]["best_step"] == found.snapshot.step:
        part = "weights" if best == "model" else best
        for name, value in read_weights(tmp_path / "weights.safetensors").items():
            assert torch.equal(found.snapshot.tensors[part][name], value), name
    assert checkpoints.checkpoints_of(tmp_path) == [found.path]
