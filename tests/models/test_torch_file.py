"""Our reader of `torch.save`'s files: equal to torch.load bit for bit, and closed to everything else."""

import argparse
import pickle
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patchloom.errors import CheckpointError
from patchloom.models.pretrained.torch_file import ForeignObjectError, read_torch_file
from patchloom.models.pretrained.weights_file import check_weights_file, read_weights_file
from patchloom.objectives.third_party_weights import read_weights

FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "sequence"])
BASE = torch.arange(24.0)
DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip


def with_metadata() -> OrderedDict[str, torch.Tensor]:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()


def stepped() -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    return {"optimizer": optimizer.state_dict(), "scaler": {"scale": 2.0**16, "_growth_tracker": 3}}


VALUES: dict[str, Any] = {
    **{str(dtype): {"a": torch.arange(5).to(dtype)} for dtype in DTYPES},
    "shared storage": {"a": BASE, "b": BASE[3:7], "c": BASE.view(4, 6).T},
    "strided": {"a": BASE.view(4, 6)[1:, ::2], "b": BASE[::5], "c": BASE[:1].expand(3, 2)},
    "empty": {"a": torch.zeros(0), "b": torch.zeros(3, 0, 2), "c": BASE[24:], "d": torch.tensor(1.5)},
    "nested": {"model": {"x": {"a": torch.ones(2)}}, "epoch": 3, "lr": 1e-3, "l": [1, (2, "z", None, True), -(2**40)]},
    "state dict": with_metadata(),
    "optimizer": stepped(),
    "parameters": {"a": torch.nn.Parameter(BASE.clone()), "b": torch.nn.Parameter(BASE, requires_grad=False)},
    "requires grad": {"a": torch.ones(2, requires_grad=True)},
    "others": {"size": torch.Size((2, 3)), "device": torch.device("cuda:1"), "dtype": torch.float16, "b": b"\x00\xff"},
    "namespace": {"model": {"a": torch.ones(1)}, "args": argparse.Namespace(lr=0.1, names=["a"], none=None)},
    "counter": {"milestones": Counter({30: 1, 60: 2})},
    "numpy scalars": {"best": np.float64(0.1), "step": np.int64(7), "flag": np.bool_(True), "half": np.float32(2.5)},
    "names": {"ü" * 300: torch.ones(1), 5: torch.zeros(1), "": torch.ones(2)},
}  # fmt: skip


def assert_equal(mine: Any, theirs: Any) -> None:
    assert type(mine) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert (mine.requires_grad, mine.storage_offset()) == (theirs.requires_grad, theirs.storage_offset())
        assert bytes(mine.detach().untyped_storage()) == bytes(theirs.detach().untyped_storage())
    elif isinstance(theirs, Mapping):
        assert list(mine) == list(theirs)
        for key in theirs:
            assert_equal(mine[key], theirs[key])
        assert_equal(getattr(mine, "_metadata", None), getattr(theirs, "_metadata", None))
    elif isinstance(theirs, list | tuple):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_equal(one, other)
    else:
        assert mine == theirs


@FORMATS
@pytest.mark.parametrize("case", VALUES)
def test_values_equal_those_of_torch(case: str, zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save(VALUES[case], path, _use_new_zipfile_serialization=zipped)
    assert_equal(read_torch_file(path), torch.load(path, weights_only=False))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn])
def test_dtypes_without_a_storage_of_their_own_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    """torch does not read them in the old format either."""
    torch.save({"a": torch.arange(5).to(dtype)}, tmp_path / "a.pth")
    assert_equal(read_torch_file(tmp_path / "a.pth"), torch.load(tmp_path / "a.pth"))


@FORMATS
def test_views_share_their_storage(zipped: bool, tmp_path: Path) -> None:
    torch.save({"a": BASE, "b": BASE[3:7]}, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    values = read_torch_file(tmp_path / "a.pth")
    values["b"][0] = -1
    assert values["a"][3] == -1


@FORMATS
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_binary_protocol_is_read(zipped: bool, protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save(VALUES["state dict"], path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    assert_equal(read_torch_file(path), torch.load(path, weights_only=False))


def test_ordered_dicts_of_python_2_keep_their_items(tmp_path: Path) -> None:
    pickled = b"\x80\x02ccollections\nOrderedDict\n]q\x00(]q\x01(U\x01aK\x01e]q\x02(U\x01bK\x02ee\x85R."
    with_pickle(tmp_path / "a.pth", pickled)
    assert read_torch_file(tmp_path / "a.pth") == OrderedDict(a=1, b=2)


def test_the_averaged_weights_of_a_training_checkpoint_are_read(tmp_path: Path) -> None:
    state = {"state_dict": {"a": torch.zeros(1)}, "state_dict_ema": {"module.a": torch.ones(1)}}
    torch.save(state, tmp_path / "a.pth")
    assert read_weights(str(tmp_path / "a.pth")) == {"a": torch.ones(1)}


# Refused --------------------------------------------------------------------------------------------------------------


def with_pickle(path: Path, pickled: bytes, *, storage: bytes = bytes(8)) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/data/0", storage)


def tensor_pickle(count: int, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """Return a pickle of {"a": a float32 tensor}, with any numbers."""

    def plain(value: Any) -> bytes:
        return pickle.dumps(value, protocol=2)[2:-1]

    storage = b"(" + plain("storage") + b"ctorch\nFloatStorage\n" + plain("0") + plain("cpu") + plain(count) + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    arguments = b"(" + storage + plain(offset) + plain(size) + plain(stride) + b"\x89" + hooks + b"t"
    return b"\x80\x02}" + plain("a") + b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"Rs."


def test_a_handmade_tensor_is_read(tmp_path: Path) -> None:
    with_pickle(tmp_path / "a.pth", tensor_pickle(2, 0, (2,), (1,)), storage=np.array([1, 2], np.float32).tobytes())
    assert read_torch_file(tmp_path / "a.pth")["a"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("count", "offset", "size", "stride"),
    [
        (2, 1, (2,), (1,)),
        (2, 0, (2,), (2,)),
        (2, 3, (0,), (1,)),
        (2, -1, (1,), (1,)),
        (2, 0, (-1,), (1,)),
        (2, 0, (2,), (-1,)),
        (2, 0, (2,), ()),
        (2, 0, (2**50, 2**50), (0, 0)),
        (2, 0, (1,) * 33, (1,) * 33),
        (3, 0, (1,), (1,)),
        (2**40, 0, (1,), (1,)),
        (-1, 0, (0,), (1,)),
    ],
)
def test_tensors_lie_inside_their_storage(
    count: int, offset: int, size: tuple[int, ...], stride: tuple[int, ...], tmp_path: Path
) -> None:
    with_pickle(tmp_path / "a.pth", tensor_pickle(count, offset, size, stride))
    with pytest.raises(ValueError, match=r"storage|shape"):
        read_torch_file(tmp_path / "a.pth")


@pytest.mark.parametrize(
    ("pickled", "fact"),
    [
        (b"\x80\x02cos\nsystem\nX\x01\x00\x00\x00a\x85R.", "os.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "os.system"),
        (b"\x80\x02cbuiltins\neval\n.", "builtins.eval"),
        (b"\x80\x02ctorch.hub\nload\n.", "torch.hub.load"),
        (b"\x80\x02ctorch\x1b[0m\nload\n.", r"\x1b"),
    ],
)
def test_other_objects_are_named_and_never_imported(pickled: bytes, fact: str, tmp_path: Path) -> None:
    with_pickle(tmp_path / "a.pth", pickled)
    with pytest.raises(ForeignObjectError) as error:
        read_torch_file(tmp_path / "a.pth")
    assert fact in error.value.name
    for read in (read_weights_file, check_weights_file):
        with pytest.raises(CheckpointError) as refused:
            read(tmp_path / "a.pth")
        assert fact in str(refused.value)
        assert str(refused.value).isprintable()


# Pairs of pairs as the name of a function: 2⁶⁰ empty lists, if converted to text.
PAIRS = b"\x80\x02]q\x00" + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60)) + b"\x93."


@pytest.mark.parametrize(
    "pickled",
    [
        b"", b".", b"\x80\x02.", b"\x80\x02(.", b"\x80\x02K\x01K\x02.", b"\x80\x02t.", b"\x80\x02h\x05.",
        b"\x80\x02)2.",
        b"\x80\x02K\x01K\x02a.", b"\x80\x02(K\x01K\x02u.", b"\x80\x02}]K\x01s.", b"\x80\x02K\x01)R.",
        b"\x80\x02ccollections\nOrderedDict\nK\x01R.", b"\x80\x02ccollections\nOrderedDict\n)R}K\x01K\x02sb.",
        b"\x80\x02]}b.", b"I1\n.", b"\x80\x02K\x01Q.", b"\x80\x02\x8b\xff\xff\xff\x7f.", PAIRS,
    ],
)  # fmt: skip
def test_invalid_pickles_are_one_line(pickled: bytes, tmp_path: Path) -> None:
    with_pickle(tmp_path / "a.pth", pickled)
    (tmp_path / "b.pth").write_bytes(pickled)
    for path in (tmp_path / "a.pth", tmp_path / "b.pth"):
        with pytest.raises(CheckpointError) as error:
            read_weights_file(path)
        assert path.name in str(error.value)
        assert "\n" not in str(error.value)


def test_long_pickles_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.save({"a": list(range(1000))}, tmp_path / "a.pth")
    monkeypatch.setattr("patchloom.models.pretrained.torch_file.MOST_OPCODES", 500)
    with pytest.raises(ValueError, match="500"):
        read_torch_file(tmp_path / "a.pth")


def test_storages_of_the_old_format_fit_into_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pickle announces far more than the file has: no memory is allocated for it."""
    path = tmp_path / "a.pth"
    torch.save({"a": torch.zeros(200)}, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    few, many = b"K\xc8", b"J\x00\x00\x00\x40"
    assert content.count(few) == 2  # of the storage and of the tensor
    path.write_bytes(content.replace(few, many))
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(ValueError, match="storages"):
        read_torch_file(path)


@FORMATS
def test_truncated_storages_are_noticed(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save({"a": torch.ones(200)}, path, _use_new_zipfile_serialization=zipped)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError):
        read_weights_file(path)


def test_a_changed_storage_of_an_archive_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save({"a": torch.full((50,), 1.5)}, path)
    content = path.read_bytes()
    value = torch.full((50,), 1.5).numpy().tobytes()
    path.write_bytes(content.replace(value, value[:-1] + b"\x40"))
    with pytest.raises(CheckpointError, match="CRC"):
        read_weights_file(path)


def test_programs_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({}, protocol=2))
        archive.writestr("a/constants.pkl", b"")
    with pytest.raises(ValueError, match="TorchScript"):
        read_torch_file(tmp_path / "a.pth")
