"""Parts that a user plugs into a training run: model, transform, loss, metrics, callbacks, optimizer.

Python code passes them to `patchloom.train`. A command reads them from `--plugin FILE`, whose functions and classes are
marked with `register`. Such a file is the user's own code, and it runs. Nothing is loaded because a run folder names
it: a run records what was plugged in by name and digest, for comparison alone.

This module is light: nothing here imports torch.
"""

import functools
import hashlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from patchloom_runtime.errors import UsageError, first_line, nearest

Kind = Literal["model", "transform", "batch_transform", "loss", "metric", "callback", "optimizer"]
KINDS: tuple[str, ...] = get_args(Kind)
SEVERAL = {"metric": "metrics", "callback": "callbacks"}  # kinds of which a run has several, and their setting
MODULE = "module:"  # begins the name of a user's module in recipes and run folders
DIGEST = 16  # letters
T = TypeVar("T")

_registered: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}  # kind → name → part
_files: list[str] = []  # plug-in files that were run
_modules: dict[str, Any] = {}  # 'module:NAME' → the module or a function that makes it


def register(kind: Kind, *, name: str | None = None, lower_is_better: bool = False) -> Callable[[T], T]:
    """Mark a function or class of a plug-in file, for `patchloom train … --plugin FILE`.

    kind             model, transform, batch_transform, loss, metric, callback or optimizer
    name             its name (default: that of the function or class)
    lower_is_better  for a metric that selects the best weights
    """
    if kind not in KINDS:
        raise UsageError(f"register takes {', '.join(KINDS)}; got {kind!r}.{nearest(str(kind), KINDS)}")
    if lower_is_better and kind != "metric":
        raise UsageError(f"lower_is_better describes a metric, not a {kind}")

    def keep(part: T) -> T:
        if lower_is_better:
            part.lower_is_better = True  # type: ignore[attr-defined]
        _registered[kind][name or name_of(part)] = part
        return part

    return keep


def load_plugin(file: str) -> None:
    """Run a plug-in file, which registers its parts. Raise UsageError if it cannot be run or registers nothing."""
    path = Path(os.path.expanduser(file))
    if not path.is_file() or path.suffix != ".py":
        raise UsageError(f"--plugin {file}: expected a Python file")
    name = re.sub(r"\W", "_", path.stem)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sum(map(len, _registered.values()))
    sys.modules.setdefault(name, module)  # so that `inspect` finds the source of its classes
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"--plugin {file}: {type(error).__name__}: {first_line(error)}") from error
    if sum(map(len, _registered.values())) == before:
        kinds = ", ".join(KINDS)
        raise UsageError(f"--plugin {file} registers nothing; mark a part with @patchloom.register(KIND): {kinds}")
    for key, part in _registered["model"].items():
        register_module(part, key)
    _files.append(os.path.abspath(path))


def plugin_files() -> list[str]:
    """Return the plug-in files that this process has run, for the processes that it starts."""
    return list(_files)


def registered_settings() -> dict[str, Any]:
    """Return what plug-in files registered as settings of a run. Raise UsageError for two parts of one kind."""
    settings: dict[str, Any] = {}
    for kind, things in _registered.items():
        if kind == "metric" and things:
            settings["metrics"] = dict(things)
        elif kind == "callback" and things:
            settings["callbacks"] = tuple(each() if isinstance(each, type) else each for each in things.values())
        elif len(things) > 1:
            raise UsageError(f"the plug-ins register {len(things)} of {kind}: {', '.join(things)}; expected one")
        elif things:
            ((name, part),) = things.items()
            settings[kind] = f"{MODULE}{name}" if kind == "model" else part
    return settings


def register_module(module: Any, name: str | None = None) -> str:
    """Keep a module, or a function that makes it, under the name that recipes and run folders use: 'module:MyNet'."""
    if not callable(module):
        kind = type(module).__name__
        raise UsageError(f"model is of type {kind}; expected a name, an nn.Module, or a function that returns one")
    name = f"{MODULE}{re.sub('[^A-Za-z0-9_.-]+', '_', (name or name_of(module)).removeprefix(MODULE))}"
    _modules[name] = module
    return name


def module_named(name: str) -> Any:
    """Return the module of a name. Raise UsageError if this process does not have it."""
    if name not in _modules:
        own = name.removeprefix(MODULE)
        raise UsageError(
            f"the network {own} is a module of the user's code, which a run does not store; pass it again: "
            f"model={own} in Python, or --plugin FILE"
        )
    return _modules[name]


def metrics_by_name(metrics: Mapping[str, Any] | Sequence[Any] | Callable[..., Any] | None) -> dict[str, Any]:
    """Return metrics by name: a dict as it is, functions by their own names."""
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping):
        named = dict(metrics)
    else:
        several = list(metrics) if isinstance(metrics, Sequence) else [metrics]
        named = {name_of(each): each for each in several}
        if len(named) < len(several):
            raise UsageError("two metrics have one name; pass them as a dict of name and function")
    for name, metric in named.items():
        if not callable(metric):
            raise UsageError(
                f"the metric {name} is of type {type(metric).__name__}; expected a function (outputs, targets)"
            )
    return named


# Names and digests ----------------------------------------------------------------------------------------------------


def name_of(part: Any) -> str:
    """Return the short name of a function, class or object."""
    if isinstance(part, functools.partial):
        return name_of(part.func)
    name = getattr(part, "__qualname__", None) or type(part).__qualname__
    return str(name).rpartition("<locals>.")[2].strip("<>")


def identity(part: Any) -> str:
    """Return the qualified name of what a user plugs in and a digest of its code and settings.

    The code is the source of the function or class, and of the classes of a module's parts; bytecode where there is no
    source. Settings are numbers and texts of the object, its `repr`, and the values that a function captures. Functions
    that it calls are not part of the digest.
    """
    digest = hashlib.sha256()
    for code in _code(part):
        digest.update(code)
        digest.update(b"\0")
    owner = part.func if isinstance(part, functools.partial) else part
    owner = owner if hasattr(owner, "__qualname__") else type(owner)
    return f"{_module_of(owner)}.{owner.__qualname__} {digest.hexdigest()[:DIGEST]}"


def _module_of(owner: Any) -> str:
    module = str(getattr(owner, "__module__", "") or "")
    if module == "__main__":  # the same file, whether it is run or imported
        return Path(getattr(sys.modules["__main__"], "__file__", None) or module).stem
    return module


def _code(part: Any) -> Iterator[bytes]:
    """Yield what a digest covers."""
    if isinstance(part, functools.partial):
        yield _plain(part.args) + _plain(part.keywords)
        yield from _code(part.func)
        return
    if inspect.isroutine(part) or isinstance(part, type):
        yield _source(part)
        with suppress(TypeError, ValueError):
            yield _plain(inspect.getclosurevars(part).nonlocals)
        return
    kinds = {type(module) for module in part.modules()} if hasattr(part, "modules") else {type(part)}
    for kind in sorted(kinds, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}"):
        yield f"{kind.__module__}.{kind.__qualname__}".encode()
        yield _source(kind)
    if type(part).__repr__ is not object.__repr__:
        yield re.sub(r"0x[0-9a-f]+", "", repr(part)).encode("utf-8", "replace")
    yield _plain(getattr(part, "__dict__", {}))


def _source(part: Any) -> bytes:
    try:
        return inspect.getsource(part).encode("utf-8", "replace")
    except (OSError, TypeError):  # typed into a console, or built in
        return _bytecode(part)


def _bytecode(part: Any) -> bytes:
    code = getattr(part, "__code__", None)
    if code is not None:
        constants = [each for each in code.co_consts if not inspect.iscode(each)]
        inner = b"".join(each.co_code for each in code.co_consts if inspect.iscode(each))
        return bytes(code.co_code) + inner + repr((constants, code.co_names)).encode("utf-8", "replace")
    if isinstance(part, type):
        return b"".join(_bytecode(each) for each in vars(part).values() if hasattr(each, "__code__"))
    return b""


def _plain(values: Any) -> bytes:
    """Return the numbers and texts among values, in a form that does not change between processes."""
    if isinstance(values, Mapping):
        kept = {str(key): value for key, value in sorted(values.items(), key=str) if _is_plain(value)}
        return repr(kept).encode("utf-8", "replace")
    return repr([value for value in values if _is_plain(value)]).encode("utf-8", "replace")


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
