"""Small runs that are trained once; tests copy them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from patchloom.tasks.plan import TrainingSettings
from patchloom.training.run import run_training
from tests.reliability.commands import class_folders

CHANGES = {"model.options.depth": 2, "model.options.dim": 16, "model.options.patch_size": 4}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/ (2 classes) and runs a, b (another seed) and vit on it."""
    root = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        _train_all(root)
    return root


def _train_all(root: Path) -> None:
    class_folders(root / "data", pictures=30)
    attending = {"model.options.depth": 1, "model.options.dim": 24, "model.options.heads": 2}
    for name, model, changes in (
        ("a", "resmlp_s12", {}),
        ("b", "resmlp_s12", {"seed": 1}),
        ("vit", "deit_ti", attending),
    ):
        settings = TrainingSettings(
            data=str(root / "data"),
            out=str(root / name),
            model=model,
            size=16,
            epochs=2,
            batch=8,
            workers=0,
            device="cpu",
            changes=CHANGES | changes,
        )
        run_training(settings, say=str)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies a run, for tests that damage it."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(trained / name, tmp_path / name))

    return copy
