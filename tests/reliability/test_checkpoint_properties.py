"""For any state: it comes back exactly; for any cut, in any file of it, nothing is read."""

import math
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from patchloom.engine.state import Snapshot, load_optimizer_state, optimizer_state
from patchloom.runs.checkpoints import find_checkpoint, load_checkpoint, save_checkpoint
from patchloom_runtime.errors import CheckpointError

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12).filter(
    lambda n: n != "__metadata__"
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
    values = torch.randint(
        0, 256, (math.prod(shape),), generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
    )
    made = (values.float() / 7 - 9 if dtype.is_floating_point else values).to(dtype).reshape(shape)
    return made.transpose(0, -1) if made.ndim > 1 and draw(st.booleans()) else made


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES, tensors(), max_size=6), st.dictionaries(NAMES, st.floats(allow_nan=False), max_size=4))
def test_any_state_comes_back_exactly(named: dict[str, torch.Tensor], plain: dict[str, float]) -> None:
    values = {"progress": {"step": 3}, "plain": plain}
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_checkpoint(save_checkpoint(Path(folder), Snapshot({"optimizer": named}, values)))
    assert loaded.values == values
    assert loaded.tensors["optimizer"].keys() == named.keys()
    for name, tensor in named.items():
        back = loaded.tensors["optimizer"][name]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back, tensor)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta"]),
    st.lists(SHAPES, min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_any_optimizer_goes_on_exactly(kind: str, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    def make() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
        return params, getattr(torch.optim, kind)(params, lr=0.01)

    def step(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        optimizer.step()

    params, optimizer = make()
    step(params, optimizer, 0)
    state, values = optimizer_state(optimizer)
    with tempfile.TemporaryDirectory() as folder:
        saved = Snapshot({"optimizer": state}, {"progress": {"step": 1}, "optimizer": values})
        loaded = load_checkpoint(save_checkpoint(Path(folder), saved))
    others, fresh = make()
    for own, other in zip(params, others, strict=True):
        other.data.copy_(own.data)
    load_optimizer_state(fresh, loaded.tensors["optimizer"], loaded.values["optimizer"])
    step(params, optimizer, 1)
    step(others, fresh, 1)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for step in (1, 2):
        parts = {"weights": {"a": torch.arange(40.0)}, "random-0": {"torch": torch.get_rng_state()}}
        save_checkpoint(folder, Snapshot(parts, {"progress": {"step": step}}))
    return folder


FILES = ["weights.safetensors", "random-0.safetensors", "state.json", "manifest.json"]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True))
@example("manifest.json", 1 - 1e-9)  # its last line feed alone
def test_any_cut_is_noticed_and_the_one_before_used(two_checkpoints: Path, name: str, where: float) -> None:
    newest = two_checkpoints / "checkpoints" / "step-00000002"
    whole = (newest / name).read_bytes()
    (newest / name).write_bytes(whole[: int(where * len(whole))])
    try:
        with pytest.raises(CheckpointError, match=name):
            load_checkpoint(newest)
        found = find_checkpoint(two_checkpoints)
    finally:
        (newest / name).write_bytes(whole)
    assert found is not None
    assert found.snapshot.step == 1
    assert name in found.notes[0]


def test_a_manifest_of_a_hundred_thousand_brackets_is_damage(two_checkpoints: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(two_checkpoints / "checkpoints" / "step-00000001", tmp_path / "copy")
    (copy / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load_checkpoint(copy)
