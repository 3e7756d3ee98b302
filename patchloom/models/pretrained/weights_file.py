"""Read untrusted weight files. They are inspected first, so that they can neither run code nor fill the memory."""

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
from safetensors.torch import load_file

from patchloom_runtime.errors import CheckpointError, UsageError

# torch does not compress tensors, and numpy's compression gains little on weights: a higher ratio is an attack.
MAX_EXPANSION = 4
HARMLESS_BYTES = 64 << 20
MOST_LISTED = 5


def read_weights_file(path: Path) -> Mapping[str, Any]:
    """Return the contents of a .safetensors, .npz, .pth or .pt file after checking that it is harmless."""
    if not os.path.isfile(path):
        raise UsageError(f"{path}: no such file; pass the path of a .safetensors, .pth or .npz file")
    check_weights_file(path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if path.suffix == ".npz":
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        # The authors' checkpoints contain their command line as an argparse.Namespace, which runs no code.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles of other versions
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # safetensors, numpy and torch raise many types for damaged files
        raise _unreadable(path, error) from error
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} contains a {type(loaded).__name__}, expected named tensors")
    tensors = _tensors(loaded)
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
            raise CheckpointError(f"{path} contains a {kind} tensor, expected dense ones: save it with dense weights")
    _refuse_expansion(path, sum(map(_copied_bytes, tensors)))
    return loaded


def check_weights_file(path: Path) -> None:
    """Raise CheckpointError for a file that would run code, or that unpacks to far more than its size."""
    if path.suffix == ".safetensors":
        return  # contains no code and is never compressed
    _check_size(path)
    if path.suffix != ".npz":
        _check_globals(path)


def _check_size(path: Path) -> None:
    # Only zip files can be compressed.
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
    except Exception as error:  # zipfile raises several types for damaged files
        raise _unreadable(path, error) from error
    _refuse_expansion(path, unpacked)


def _refuse_expansion(path: Path, unpacked: int) -> None:
    size = path.stat().st_size
    if unpacked > max(HARMLESS_BYTES, MAX_EXPANSION * size):
        raise CheckpointError(
            f"{path} has {size:,} bytes that unpack to {unpacked:,}, which weights never do. Refused."
        )


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return all tensors in nested mappings and lists, of any depth and even if they contain themselves."""
    tensors, rest, visited = [], [value], set()
    while rest:
        one = rest.pop()
        if isinstance(one, torch.Tensor):
            tensors.append(one)
        elif isinstance(one, Mapping | list | tuple) and id(one) not in visited:
            visited.add(id(one))
            rest += one.values() if isinstance(one, Mapping) else one
    return tensors


def _copied_bytes(tensor: torch.Tensor) -> int:
    """Return the size of a copy: a tensor of stride 0 stores one number for millions."""
    return tensor.numel() * tensor.element_size()


def _check_globals(path: Path) -> None:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # not torch's zip format: an older one, a plain pickle, or not a checkpoint
        unsafe = _pickled_globals(path)
    if unsafe:
        listed = ", ".join(unsafe[:MOST_LISTED]) + (" …" if len(unsafe) > MOST_LISTED else "")
        raise CheckpointError(
            f"{path} contains more than weights: loading it would call {listed}. Refused; ask for a .safetensors file."
        )


def _pickled_globals(path: Path) -> list[str]:
    """Return the globals that a sequence of pickles imports, except those of torch's own files; [] if not a pickle."""
    names: dict[str, None] = {}
    try:
        with path.open("rb") as file:
            # torch's format before 1.6 has five pickles: magic number, version, machine, the object, storage names.
            for _ in range(5):
                strings: list[str] = []
                for code, value, _ in pickletools.genops(file):
                    if isinstance(value, str) and code.name != "GLOBAL":
                        strings.append(value)
                    if code.name == "GLOBAL":
                        names[str(value).replace(" ", ".")] = None
                    elif code.name == "STACK_GLOBAL":
                        names[".".join(strings[-2:])] = None
    except Exception:  # the end of the pickles
        pass
    return [name for name in names if not name.startswith(("torch.", "collections.OrderedDict", "argparse.Namespace"))]


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:200]}"
    if isinstance(error, pickle.UnpicklingError):  # torch's message advises weights_only=False
        reason = "it contains other objects than tensors"
    return CheckpointError(
        f"{path} ({path.stat().st_size:,} bytes) is not a readable checkpoint: {reason}; "
        "it may be truncated or of another format: download it again, or pass a .safetensors, .pth or .npz file"
    )
