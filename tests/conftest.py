"""What all tests share: where the reference data is, one thread per worker, small networks of every name."""

import importlib
import itertools
import pkgutil
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import patchloom
from patchloom_runtime.errors import UsageError

pytest_plugins = ["tests.small_runs"]

warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)

# No test depends on how busy the machine is.
settings.register_profile("patchloom", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patchloom")

REPOSITORY = Path(__file__).parent.parent
SHARED = REPOSITORY.parent / "shared"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Workers of pytest-xdist share the cores; more threads would only fight for them."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _everything_imported() -> None:
    """What is imported late would otherwise keep whatever a test has put in the place of a part of it."""
    for module in pkgutil.walk_packages(patchloom.__path__, "patchloom.", onerror=_pass_over_missing_extras):
        if module.name != "patchloom.timm" and not module.name.endswith("__main__"):  # which act when they are imported
            try:
                importlib.import_module(module.name)
            except (ModuleNotFoundError, UsageError):
                _pass_over_missing_extras(module.name)


def _pass_over_missing_extras(_: str) -> None:
    """Raise the error of an import, unless an extra is not installed."""
    error = sys.exception()
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("patchloom"):
        return
    if isinstance(error, UsageError) and "not installed" in str(error):
        return
    raise


@pytest.fixture(scope="session", autouse=True)
def _signals_as_on_a_terminal() -> None:
    """A job in the background or under nohup ignores some, and the processes it starts inherit that."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each worker takes a half of the tests in one piece, so that what a file shares is made once, not by both."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None


@pytest.fixture(scope="session")
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder per test, made when it is written to."""
    root = tmp_path_factory.mktemp("caches")
    return (root / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _cache_of_its_own(_caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept in the user's folder, and weights that lie there are not fine-tuned by `--init auto`."""
    from huggingface_hub import constants

    folder = next(_caches)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.delenv("TORCH_HOME", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "huggingface"))


@pytest.fixture
def parity() -> Any:
    """Reads a stored input and output of the authors' code: parity(name) → (tensors, config)."""
    folder = SHARED / "parity"
    if not folder.is_dir():
        pytest.skip("../shared/parity is not here: the authors' stored outputs cannot be compared")

    def read(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        import json

        from safetensors import safe_open

        with safe_open(folder / f"{name}.safetensors", "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return tensors, json.loads(file.metadata()["config"])

    return read
