"""Convert weight files to run folders, and run folders to weight files for timm, torchvision or the authors' code."""

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from patchloom.disk import atomic_write
from patchloom.models.catalog import CATALOG
from patchloom.models.network import Network
from patchloom.models.pretrained.conversion import converted, network_of
from patchloom.models.pretrained.names import State
from patchloom.models.pretrained.table import published, unknown_network
from patchloom.runs.config import Preprocessing, is_run
from patchloom.runs.folders import default_preprocessing, refuse_taken, write_published
from patchloom.runs.imagenet_names import names_for
from patchloom.runs.locate import is_third_party, run_folder
from patchloom.runs.third_party import write_third_party_run
from patchloom.runs.weights import load_network, packed
from patchloom_runtime.errors import CheckpointError, UsageError, with_near_options
from patchloom_runtime.untrusted import read_plain

SUFFIXES = (".safetensors", ".pth", ".pt", ".npz")
PUBLISHERS = ("timm", "authors", "torchvision")


@dataclass(frozen=True)
class ConversionSummary:
    """Facts about a conversion, for the command to print."""

    network: Network
    labels: tuple[str, ...]
    preprocessing: Preprocessing
    as_of: str = ""  # name of the published weights whose preprocessing is used
    use: str = ""  # how the other library creates the network
    notes: tuple[str, ...] = ()


def file_to_run(
    file: str | os.PathLike[str], model: str, out: Path, labels: Sequence[str] | None = None
) -> ConversionSummary:
    """Convert weights in the authors', timm's, Flax's or patchloom's layout to a run folder of the network `model`.

    Image size and number of classes come from the file. Crop ratio and pixel statistics, which it does not contain,
    are those of the weights published for this size.
    """
    refuse_taken(out)
    if is_third_party(model):
        return _third_party_to_run(file, model, out, labels)
    if model not in CATALOG:
        raise unknown_network(model)
    try:
        network = network_of(model, file)
    except CheckpointError as error:
        message = str(error)
        prefix = "" if message.startswith(os.fspath(file)) else f"{os.fspath(file)}: "
        raise CheckpointError(f"{prefix}{message}") from error
    preprocessing, as_of = _published_preprocessing(network)
    names, synonyms = names_for(network.config.num_classes, labels)
    write_published(
        network,
        out,
        origin=f"Converted from {Path(file).name}",
        labels=names,
        other_names=synonyms,
        preprocessing=preprocessing,
    )
    return ConversionSummary(network, names, preprocessing, as_of)


def _third_party_to_run(
    file: str | os.PathLike[str], model: str, out: Path, labels: Sequence[str] | None
) -> ConversionSummary:
    if "@" in model:
        raise UsageError(f"--model {model} names a file, but the file to convert is {os.fspath(file)}; remove @…")
    write_third_party_run(f"{model}@{os.fspath(file)}", out, labels)
    network, files = load_network(out)
    return ConversionSummary(network, files.labels, files.preprocessing, as_of=model)


def _published_preprocessing(network: Network) -> tuple[Preprocessing, str]:
    """Return the preprocessing and the name of the published weights, preferably those of the same image size."""
    size = network.config.image_size
    known = published(network.config.name)
    rows = [row for row in known if (row.image_size, row.image_size) == size] or known
    if not rows:
        return default_preprocessing(network), ""
    row = rows[0]
    return Preprocessing(row.mean, row.std, size, row.crop_ratio, row.interpolation), row.name


def run_to_file(run: str | os.PathLike[str], to: str, out: Path) -> ConversionSummary:
    """Write the weights of a run with timm's, torchvision's or the authors' names, as .safetensors, .pth or .npz."""
    if to not in PUBLISHERS:
        raise UsageError(f"--to is {to!r}, expected one of {', '.join(PUBLISHERS)}")
    if out.suffix not in SUFFIXES:
        raise UsageError(f"{out} is not a weights file; use a name that ends with one of {', '.join(SUFFIXES)}")
    if os.path.lexists(out):
        raise UsageError(f"{out} exists already; choose another file or remove it")
    network, files = load_network(run_folder(run))
    result = converted(network, to)
    atomic_write(out, _to_bytes(result.state, out.suffix, wrapped=to == "authors"))
    return ConversionSummary(network, files.labels, files.preprocessing, use=result.use, notes=result.notes)


def _to_bytes(state: State, suffix: str, *, wrapped: bool) -> bytes:
    if suffix == ".safetensors":
        return packed(state, {"format": "pt"})
    target = io.BytesIO()
    if suffix == ".npz":
        arrays: dict[str, np.ndarray] = {key: tensor.numpy() for key, tensor in state.items()}
        np.savez(target, allow_pickle=False, **arrays)
    else:  # the authors' scripts read the weights from the key `model`
        torch.save({"model": state} if wrapped else state, target)
    return target.getvalue()


def read_names(file: str | os.PathLike[str]) -> list[str]:
    """Return the class names of a text file, one per line, in the order of the outputs."""
    try:
        lines = read_plain(Path(file)).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{os.fspath(file)}: the class names cannot be read: {error}") from error
    names = [line.strip() for line in lines]
    while names and not names[-1]:
        names.pop()
    if not all(names):
        raise UsageError(f"{os.fspath(file)}: line {names.index('') + 1} is empty, expected one class name per line")
    return names


@with_near_options
def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    model: str | None = None,
    labels: str | os.PathLike[str] | None = None,
    to: str | None = None,
) -> ConversionSummary:
    """Turn a weights file into a run; with `to`, a run into a weights file, as `patchloom convert` does.

    source  Weights file (.safetensors, .pth or .npz); with `to`, a run.
    out     Run folder to write; with `to`, the file (.safetensors, .pth or .npz).
    model   Network of the file: a name, 'timm:NAME' or 'torchvision:NAME'.
    labels  File of class names, one per line. Default: ImageNet's for 1,000 classes, else numbers.
    to      Target layout: 'timm', 'authors' or 'torchvision'.
    """
    if to is not None:
        if model is not None or labels is not None:
            raise UsageError("--model and --labels are for a file that becomes a run; --to is for a run")
        return run_to_file(source, to, Path(out))
    if is_run(os.fspath(source)):
        raise UsageError(f"{source} is already a run; --to timm or --to authors makes a file of its weights")
    if model is None:
        raise UsageError(f"name the network of {source}: --model NAME; `patchloom models` lists them")
    return file_to_run(source, model, Path(out), read_names(labels) if labels else None)
