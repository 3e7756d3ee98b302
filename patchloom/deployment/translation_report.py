"""`report.html` of a translation run, from what its folder holds."""

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from markupsafe import Markup
from PIL import Image

from patchloom.deployment.run_record import read_run_record
from patchloom.deployment.text_evaluation import TextEvaluation
from patchloom.deployment.translation_files import TranslationFiles, load_seq2seq
from patchloom.engine.checksums import read_checked, write_checked
from patchloom.engine.records import read_metrics
from patchloom.errors import CheckpointError
from patchloom.foreign import check_shape, parse_json
from patchloom.inspection.report import RecipeRow, Summary, recipe_rows, write_report
from patchloom.inspection.sequences import attention_chart, cross_attention, position_picture
from patchloom.models.seq2seq import Seq2Seq

T = TypeVar("T")

VAL = "val.json"
SAMPLES = 20
# Subwords of the sentence whose attention is shown: more are no longer read.
READABLE = 40
_SHAPE = {
    "values": dict[str, float],
    "signature": str,
    "chrf_signature": str,
    "notes": list[str],
    "samples": list[list[str]],
}
_TOLD = {
    "bleu": "sacreBLEU, cased",
    "bleu_tokenised": "of words and marks, cased",
    "bleu_lowercase": "the same, lower-cased",
    "bleu_compound": "with hyphens inside words as tokens of their own",
    "chrf": "chrF2",
    "exact": "percent of sentences that are their reference",
    "sentences": "of the val split",
    "loss": "of the references' tokens, in nats",
    "perplexity": "exp(loss)",
    "tokens": "of the references, their ends counted",
}


def keep_val(folder: Path, judged: TextEvaluation) -> None:
    """Keep the numbers of val and some translations from all over it in `val.json`."""
    every = max(1, len(judged.sources) // SAMPLES)
    rows = list(zip(judged.sources, judged.references, judged.translations, strict=True))[::every][:SAMPLES]
    values = {
        "values": dict(judged),
        "signature": judged.scores.signature,
        "chrf_signature": judged.scores.chrf_signature,
        "notes": list(judged.notes),
        "samples": rows,
    }
    write_checked(folder, {VAL: (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()})


def report_translation(folder: Path, *, out: Path | None = None) -> Path:
    """Write the report of a translation run and return its path."""
    network, files = load_seq2seq(folder)
    lost: list[str] = []
    record, val = _attempt(read_run_record, folder, lost), _attempt(read_val, folder, lost) or {}
    metrics = _attempt(read_metrics, folder / "metrics.jsonl", lost) or []
    told = {"bleu": val["signature"], "chrf": val["chrf_signature"]} if val else {}
    numbers = [
        (name, f"{value:,.0f}" if value >= 1000 else f"{value:.4g}", told.get(name, _TOLD.get(name, "")))
        for name, value in val.get("values", {}).items()
    ]
    page = out or folder / "report.html"
    why = record.choices if record else {}
    rows = recipe_rows(files.recipe) if files.recipe else []
    write_report(
        page,
        title=f"{files.network} on {record.data_name}" if record else f"{files.network}, {folder.name}",
        summary=Summary(
            model=files.network,
            data=record.data_name if record else "not recorded",
            epochs=record.epochs if record else None,
            seconds=record.seconds if record else None,
            command=record.command(folder) if record else "",
            next_command=f"patchloom translate {shlex.quote(str(folder))} < source.txt",
        ),
        curves=metrics,
        pictures=_pictures(network, files, val.get("samples", [])),
        recipe=[RecipeRow(row.key, row.value, why.get(row.key, row.why)) for row in rows],
        notes=[*(record.notes if record else []), *val.get("notes", []), *lost],
        numbers=numbers,
        samples=[tuple(row) for row in val.get("samples", [])],
        environment=record.versions | {"machine": record.machine} if record else None,
    )
    return page


def _attempt(read: Callable[[Path], T], path: Path, notes: list[str]) -> T | None:
    """What `read` gives; where it cannot, its reason becomes a note."""
    try:
        return read(path)
    except CheckpointError as error:
        notes.append(str(error))
        return None


def read_val(folder: Path) -> dict[str, Any]:
    """What `keep_val` wrote; nothing where there is none."""
    path = folder / VAL
    if not os.path.lexists(path):
        return {}
    try:
        values = parse_json(read_checked(folder, VAL))
        check_shape(values, _SHAPE)
        if any(len(row) != 3 for row in values["samples"]):
            raise ValueError("a sample is not a source, a reference and a translation")
        return values
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}. Remove it, or write it again by training.") from error


def _pictures(
    network: Seq2Seq, files: TranslationFiles, samples: list[list[str]]
) -> list[tuple[str, Image.Image | Markup, str]]:
    pictures: list[tuple[str, Image.Image | Markup, str]] = []
    if (mixing := position_picture(network, files.longest)) is not None:
        told = "Row t: how position t is put together from all positions; red is positive, blue negative, white zero."
        pictures.append(("Mixing of positions", mixing, told))
    encode, most = files.vocabulary.encode, min(READABLE, network.config.max_length - 1)
    # Its own translations, or references where it has none that can be shown.
    pairs = [(encode(source), encode(translation)) for source, *both in samples for translation in reversed(both)]
    fitting = [pair for pair in pairs if all(1 <= len(side) <= most for side in pair)]
    if fitting:
        source, target = max(fitting, key=lambda pair: len(pair[0]) + len(pair[1]))
        names = [[files.vocabulary.piece(number) for number in side] for side in (source, target)]
        for layer, weights in enumerate(cross_attention(network, source, target), 1):
            caption = "Mean over heads; before a row is written, its columns are looked at so much."
            pictures.append((f"Where decoder layer {layer} looks", attention_chart(weights, *names), caption))
    return pictures
