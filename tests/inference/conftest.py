"""What several tests of indexes begin with."""

from pathlib import Path

import pytest

from patchloom.data import packing


@pytest.fixture
def shards(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The images of `trained` in seven tar shards or more."""
    original = packing._shards
    monkeypatch.setattr(packing, "_shards", lambda listing, classes, _: original(listing, classes, 3000))
    packing.pack(trained / "data", out=tmp_path / "shards")
    return tmp_path / "shards"
