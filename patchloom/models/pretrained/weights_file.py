"""Files of weights that others wrote, looked at before they are opened: no code of theirs runs, none fills memory."""

import argparse
import os
import pickle
import pickletools
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patchloom_runtime.errors import CheckpointError, UsageError

# torch stores tensors as they are and numpy's compression gains little on weights: more is no network.
MAX_EXPANSION = 4
HARMLESS_BYTES = 64 << 20
GLOBALS_SHOWN = 5


def read_weights_file(path: Path) -> Mapping[str, Any]:
    """What a .safetensors, .npz, .pth or .pt file holds, once it is known to be harmless."""
    if not os.path.isfile(path):
        raise UsageError(f"{path}: no such file; give the path of a .safetensors, .pth or .npz file")
    check_weights_file(path)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        if path.suffix == ".npz":
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        # The authors' training checkpoints hold their command line as an argparse.Namespace, which runs no code.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles of other versions
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file makes safetensors, numpy and torch raise nearly anything
        raise _unreadable(path, error) from error
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, expected named tensors")
    tensors = _tensors(loaded)
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
            raise CheckpointError(f"{path} holds a {kind} tensor, expected plain ones: save it with dense weights")
    _refuse_expansion(path, sum(map(_bytes_in, tensors)))
    return loaded


def check_weights_file(path: Path) -> None:
    """A CheckpointError for a file that asks for foreign code, or that unpacks to far more than its size."""
    if path.suffix == ".safetensors":
        return  # holds no code and is never compressed
    _check_size(path)
    if path.suffix != ".npz":
        _check_globals(path)


def _check_size(path: Path) -> None:
    """Of a zip; older formats hold what they show."""
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
    except Exception as error:  # damaged: zipfile has several kinds for it
        raise _unreadable(path, error) from error
    _refuse_expansion(path, unpacked)


def _refuse_expansion(path: Path, unpacked: int) -> None:
    size = path.stat().st_size
    if unpacked > max(HARMLESS_BYTES, MAX_EXPANSION * size):
        raise CheckpointError(
            f"{path} has {size:,} bytes that unpack to {unpacked:,}: no network's weights do. Refused."
        )


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in nested mappings and lists, however deep these are, and be it in themselves."""
    found, rest, visited = [], [value], set()
    while rest:
        one = rest.pop()
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, Mapping | list | tuple) and id(one) not in visited:
            visited.add(id(one))
            rest += one.values() if isinstance(one, Mapping) else one
    return found


def _bytes_in(tensor: torch.Tensor) -> int:
    """Of all its values: a tensor of stride 0 stores one for millions, until it is copied."""
    return tensor.numel() * tensor.element_size()


def _check_globals(path: Path) -> None:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # not torch's zip format: an older one, a plain pickle, or no checkpoint at all
        foreign = _pickled_globals(path)
    if foreign:
        shown = ", ".join(foreign[:GLOBALS_SHOWN]) + (" …" if len(foreign) > GLOBALS_SHOWN else "")
        raise CheckpointError(
            f"{path} is not only weights: loading it would call {shown}. Refused; ask for a .safetensors file."
        )


def _pickled_globals(path: Path) -> list[str]:
    """What pickles one after the other ask for, less what torch's own files need; [] where it is no pickle."""
    found: dict[str, None] = {}
    try:
        with path.open("rb") as file:
            # torch's format before 1.6: magic number, version, machine, the object, names of the storages.
            for _ in range(5):
                strings: list[str] = []
                for code, value, _ in pickletools.genops(file):
                    if isinstance(value, str) and code.name != "GLOBAL":
                        strings.append(value)
                    if code.name == "GLOBAL":
                        found[str(value).replace(" ", ".")] = None
                    elif code.name == "STACK_GLOBAL":
                        found[".".join(strings[-2:])] = None
    except Exception:  # the end of what is a pickle
        pass
    return [name for name in found if not name.startswith(("torch.", "collections.OrderedDict", "argparse.Namespace"))]


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:200]}"
    if isinstance(error, pickle.UnpicklingError):  # torch then advises to load it without its guard
        reason = "it holds no plain tensors"
    return CheckpointError(
        f"{path} ({path.stat().st_size:,} bytes) is not a readable checkpoint: {reason}; "
        "it may be truncated or of another kind: fetch it again, or give a .safetensors, .pth or .npz file"
    )
