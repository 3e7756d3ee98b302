"""Weights that others wrote: none runs code, none fills the memory, each is refused in one line with exit code 4."""

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patchloom.models.pretrained.published import load_published
from patchloom.models.pretrained.weights_file import check_weights_file
from patchloom.models.registry import create_model
from patchloom.objectives.teacher import load_teacher
from patchloom_runtime.errors import CheckpointError
from tests.reliability.commands import OPTIONS, class_folders, command


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("escaped",)


def safetensors(header: dict[str, Any], size: int) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


def tensor(start: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end]}


def compressed(path: Path) -> None:
    torch.save({"a": torch.zeros(20_000_000)}, path)
    with zipfile.ZipFile(path) as plain:
        members = {name: plain.read(name) for name in plain.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def small_weights() -> dict[str, torch.Tensor]:
    from patchloom.recipes import get_recipe, override
    from patchloom.tasks.images.networks import make_network

    small = {"depth": 1, "dim": 16, "patch_size": 8}
    changes = {f"model.options.{key}": value for key, value in small.items()} | {"model.image_size": 16}
    return make_network(override(get_recipe("small_images"), changes), 2).state_dict()


def not_finite(path: Path) -> None:
    weights = small_weights()
    next(iter(weights.values())).view(-1)[0] = torch.nan
    torch.save(weights, path)


def first_changed(change: Callable[[torch.Tensor], Any]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        weights = small_weights()
        name = next(name for name, weight in weights.items() if weight.ndim > 1)
        torch.save(weights | {name: change(weights[name])}, path)

    return write


LISTS = b"]" * 200_000 + b"a" * 199_999  # in lists
NESTED = b"\x80\x02" + LISTS + b"."
NESTED_MODEL = b"\x80\x02}X\x05\x00\x00\x00model" + LISTS + b"s."
ITSELF = b"\x80\x02]q\x00h\x00a."  # of a list that holds itself


def in_zip(pickled: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        torch.save({"a": torch.zeros(2)}, path)
        with zipfile.ZipFile(path) as plain:
            members = {name: plain.read(name) for name in plain.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, pickled if name.endswith("data.pkl") else content)

    return write


Case = tuple[str, str, Callable[[Path], Any]]  # file, a fact in the line, what writes it
CASES: dict[str, Case] = {
    "8 zero bytes": ("w.safetensors", "0 bytes", lambda p: p.touch()),
    "8 zero bytes as pth": ("w.pth", "0 bytes", lambda p: p.touch()),
    "9 truncated": ("w.pth", "94 bytes", lambda p: p.write_bytes(b"PK\x03\x04" + bytes(90))),
    "11 not finite": ("w.pth", "NaN", not_finite),
    "12 a sparse tensor": ("w.pth", "sparse", first_changed(torch.Tensor.to_sparse)),
    "12 a tensor without values": ("w.pth", "meta", first_changed(lambda weight: weight.to("meta"))),
    "12 lists in lists": ("w.pth", "w.pth", in_zip(NESTED)),
    "12 lists in lists as the model": ("w.pth", "model", in_zip(NESTED_MODEL)),
    "12 lists in lists of a plain pickle": ("w.pth", "w.pth", lambda p: p.write_bytes(NESTED)),
    "12 a list that holds itself": ("w.pth", "w.pth", in_zip(ITSELF)),
    "12 another network": ("w.pth", "resmlp_s12", lambda p: torch.save({"a": torch.zeros(2)}, p)),
    "14 foreign globals": ("w.pth", "posix.mkdir", lambda p: torch.save({"a": Attack()}, p)),
    "14 the old format": (
        "w.pth",
        "posix.mkdir",
        lambda p: torch.save({"a": Attack()}, p, _use_new_zipfile_serialization=False),
    ),
    "14 a plain pickle": ("w.pt", "posix.mkdir", lambda p: p.write_bytes(pickle.dumps(Attack()))),
    "14 objects in npz": ("w.npz", "allow_pickle=False", lambda p: np.savez(p, a=np.array([Attack()], dtype=object))),
    "15 renamed": ("w.safetensors", "w.safetensors", lambda p: torch.save({"a": Attack()}, p)),
    "16 compression bomb": ("w.pth", " 80,00", compressed),
    "16 one value for millions": (
        "w.pth",
        " 80,000,000",
        lambda p: torch.save({"model": {"a": torch.zeros(1).expand(20_000_000)}}, p),
    ),
    "16 compressed arrays": (
        "w.npz",
        " 80,00",
        lambda p: np.savez_compressed(p, a=np.zeros(20_000_000, np.float32)),
    ),
    "17 oversized header": (
        "w.safetensors",
        "w.safetensors",
        lambda p: p.write_bytes(struct.pack("<Q", 1 << 40) + b"{}"),
    ),
    "17 overlapping tensors": (
        "w.safetensors",
        "w.safetensors",
        lambda p: p.write_bytes(safetensors({"a": tensor(0, 8), "b": tensor(4, 12)}, 12)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_weights_are_refused_in_one_line(case: str, tmp_path: Path, monkeypatch, capsys) -> None:
    name, fact, write = CASES[case]
    monkeypatch.chdir(tmp_path)
    file = tmp_path / name
    write(file)
    data = class_folders(tmp_path / "data")
    done = command(
        ("train", data, "--out", tmp_path / "run", *OPTIONS, "--model", "resmlp_s12", "--init", file),
        monkeypatch,
        capsys,
    )
    assert done.code == 4, done.errors
    assert fact in done.errors
    assert done.errors.count("\n") == 1
    assert not (tmp_path / "escaped").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_teacher_is_looked_at_too(tmp_path: Path, monkeypatch, capsys) -> None:
    torch.save({"a": Attack()}, tmp_path / "teacher.pth")
    data = class_folders(tmp_path / "data")
    teacher = f"timm:test_resnet@{tmp_path / 'teacher.pth'}"
    done = command(("train", data, "--out", tmp_path / "run", *OPTIONS, "--teacher", teacher), monkeypatch, capsys)
    assert done.code == 4
    for fact in ("teacher.pth", "posix.mkdir"):
        assert fact in done.errors


def bomb(path: Path) -> None:
    compressed(path)


def attack(path: Path) -> None:
    torch.save({"a": Attack()}, path)


@pytest.mark.parametrize(("write", "fact"), [(bomb, " 80,00"), (attack, "posix.mkdir")])
@pytest.mark.parametrize(
    "load",
    [
        lambda path: load_published(create_model("resmlp_s12", depth=1, dim=16), path),
        lambda path: load_teacher(f"timm:test_resnet@{path}", 1000),
        lambda path: load_teacher(f"torchvision:resnet18@{path}", 1000),
        lambda path: load_teacher(f"resmlp_s12@{path}", 1000),
    ],
    ids=["load_published", "timm", "torchvision", "patchloom"],
)
def test_python_callers_are_protected_too(load, write, fact: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "w.pth")
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(CheckpointError, match=fact) as error:
        load(tmp_path / "w.pth")
    assert "w.pth" in str(error.value)
    assert not (tmp_path / "escaped").exists()


@pytest.mark.parametrize("new_format", [True, False])
def test_plain_weights_pass(tmp_path: Path, new_format: bool) -> None:
    from argparse import Namespace
    from collections import OrderedDict

    weights = OrderedDict(a=torch.zeros(3), b=torch.zeros(2, dtype=torch.float16), c=torch.nn.Parameter(torch.ones(2)))
    content = {"model": weights, "args": Namespace(lr=0.1), "epoch": 3}
    torch.save(content, tmp_path / "w.pth", _use_new_zipfile_serialization=new_format)
    check_weights_file(tmp_path / "w.pth")


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch) -> None:
    compressed(tmp_path / "w.pth")
    monkeypatch.setattr(zipfile.ZipFile, "read", None)
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(CheckpointError) as error:
        check_weights_file(tmp_path / "w.pth")
    for fact in ("w.pth", f"{(tmp_path / 'w.pth').stat().st_size:,}"):
        assert fact in str(error.value)
