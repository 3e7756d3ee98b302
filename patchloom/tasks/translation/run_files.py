"""The files of a translation run: `config.json`, `recipe.yaml`, `vocabulary.model` and `val.json`."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchloom.models.seq2seq import Seq2Seq, create_seq2seq
from patchloom.recipes.schema import Recipe
from patchloom.runs.checksums import read_checked, write_checked
from patchloom.runs.config import read_config, read_recipe, write_config
from patchloom.runs.weights import load_trained
from patchloom_runtime.errors import CheckpointError, UsageError
from patchloom_runtime.text.vocabulary import Vocabulary
from patchloom_runtime.untrusted import check_shape, parse_json, read_plain

VOCABULARY = "vocabulary.model"
VAL = "val.json"
SAMPLES = 20
_VAL_SHAPE = {
    "values": dict[str, float],
    "signature": str,
    "chrf_signature": str,
    "notes": list[str],
    "samples": list[list[str]],
}
_SHAPE = {"source": str, "target": str, "longest": list[int], "vocabulary": str}


@dataclass(frozen=True)
class TranslationFiles:
    """The files of a translation run, without its weights."""

    network: str
    options: dict[str, Any]
    source: str  # languages
    target: str
    longest: tuple[int, int]  # subwords of the longest source and target in training
    vocabulary: Vocabulary
    recipe: Recipe | None


def write_translation_files(
    folder: Path,
    network: Seq2Seq,
    recipe: Recipe,
    vocabulary: Vocabulary,
    *,
    task: str,
    languages: tuple[str, str],
    longest: tuple[int, int],
) -> None:
    """Write the files of a translator, without its weights."""
    data = vocabulary.to_bytes()
    fields: dict[str, Any] = {"source": languages[0], "target": languages[1], "longest": list(longest)}
    fields |= {"vocabulary": hashlib.sha256(data).hexdigest()}
    write_config(folder, task, network.config, recipe, {VOCABULARY: data}, **fields)


def read_translation_files(folder: Path) -> TranslationFiles:
    """Read what `write_translation_files` wrote."""
    if not os.path.isfile(folder / "config.json"):
        raise UsageError(f"{folder} is not a run folder: it has no config.json")
    config = read_config(folder)
    if "vocabulary" not in config:
        raise UsageError(f"{folder} is not a translator; train one with --recipe translation_small")
    try:
        check_shape(config, _SHAPE)
        if len(config["longest"]) != 2 or min(config["longest"]) < 1:
            raise ValueError(f"longest is {config['longest']}, expected the subwords of a source and a target")
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'} lacks a field or has a wrong one: {error}.") from error
    vocabulary = read_vocabulary(folder, config["vocabulary"])
    if config["options"].get("vocabulary") != len(vocabulary):
        raise CheckpointError(
            f"{folder / 'config.json'} is of a vocabulary of {config['options'].get('vocabulary')!r} subwords, "
            f"{VOCABULARY} has {len(vocabulary):,}. Restore both."
        )
    return TranslationFiles(
        network=config["network"],
        options=config["options"],
        source=config["source"],
        target=config["target"],
        longest=(config["longest"][0], config["longest"][1]),
        vocabulary=vocabulary,
        recipe=read_recipe(folder),
    )


def read_vocabulary(folder: Path, sha256: str | None) -> Vocabulary:
    """Read the vocabulary of a run and compare it with its checksum."""
    path = folder / VOCABULARY
    try:
        data = read_plain(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if sha256 and hashlib.sha256(data).hexdigest() != sha256:
        raise CheckpointError(f"{path} is not the vocabulary the run was trained with. Restore the file.")
    return Vocabulary.from_bytes(data)


def load_seq2seq(folder: Path) -> tuple[Seq2Seq, TranslationFiles]:
    """Load the trained network of a translation run, in eval mode, and its files."""
    files = read_translation_files(folder)
    return load_trained(folder, lambda: create_seq2seq(files.network, **files.options), files.options), files


def write_val(folder: Path, report: Any) -> None:
    """Write the metrics of val and some translations to `val.json`."""
    every = max(1, len(report.sources) // SAMPLES)
    rows = list(zip(report.sources, report.references, report.translations, strict=True))[::every][:SAMPLES]
    values = {
        "values": dict(report),
        "signature": report.scores.signature,
        "chrf_signature": report.scores.chrf_signature,
        "notes": list(report.notes),
        "samples": rows,
    }
    write_checked(folder, {VAL: (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()})


def read_val(folder: Path) -> dict[str, Any]:
    """Read `val.json`; an empty dict if there is none."""
    path = folder / VAL
    if not os.path.lexists(path):
        return {}
    try:
        values = parse_json(read_checked(folder, VAL))
        check_shape(values, _VAL_SHAPE)
        if any(len(row) != 3 for row in values["samples"]):
            raise ValueError("a sample is not a source, a reference and a translation")
        return values
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}. Remove it, or write it again by training.") from error
