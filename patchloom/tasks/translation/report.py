"""The results of a translator in words, pages and tables."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL import Image

from patchloom.models.seq2seq import Seq2Seq
from patchloom.report.pictures.sequences import attention_chart, cross_attention, position_picture
from patchloom.report.run_report import Charts, validation
from patchloom.report.sections import picture_section, sample_section
from patchloom.tasks.report import ReportSettings
from patchloom.tasks.task import Reporting, Scores, TaskPage
from patchloom.tasks.translation.evaluation import TextEvaluation, evaluate_text
from patchloom.tasks.translation.model import load_translator
from patchloom.tasks.translation.run_files import VAL, TranslationFiles, load_seq2seq, read_translation_files, read_val
from patchloom_runtime.errors import UsageError, attempted

CHARTS: Charts = {
    "Validation BLEU, greedy": validation("bleu_greedy", average="average", name="average of epochs"),
    "Exact translations, greedy, %": validation("exact_greedy", average="average", name="average of epochs"),
}
_COLUMNS = ("bleu", "bleu_tokenised", "bleu_lowercase", "bleu_compound", "chrf", "exact", "loss", "perplexity")
READABLE = 40  # subwords of the sentence whose attention is drawn
_EXPLAINED = {
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


def translation_page(folder: Path, network: Seq2Seq | None) -> TaskPage:
    """Return metrics and translations of val, the mixing of positions, and the attention of the decoder."""
    lost: list[str] = []
    files, val = read_translation_files(folder), attempted(lambda: read_val(folder), lost) or {}
    if not val and not lost:
        lost.append(f"{folder} has no {VAL}: metrics and translations of val are unknown")
    signatures = {"bleu": val["signature"], "chrf": val["chrf_signature"]} if val else {}
    numbers = [
        (name, f"{value:,.0f}" if value >= 1000 else f"{value:.4g}", signatures.get(name, _EXPLAINED.get(name, "")))
        for name, value in val.get("values", {}).items()
    ]
    samples = [tuple(row) for row in val.get("samples", [])]
    pictures = _pictures(network or load_seq2seq(folder)[0], files, val.get("samples", []))
    return TaskPage(
        numbers=numbers,
        charts=CHARTS,
        trained_on="smoothed targets and with dropout",
        sections=[
            *([sample_section(samples)] if samples else []),
            *([picture_section(pictures)] if pictures else []),
        ],
        notes=[*val.get("notes", []), *lost],
        next_command=f"patchloom translate {shlex.quote(str(folder))} < source.txt",
    )


def text_scores(evaluations: Mapping[str, Mapping[str, TextEvaluation]]) -> Scores:
    """Return runs and splits as a table, with the signatures of the metrics."""
    rows, notes = [], []
    for run, splits in evaluations.items():
        for name, each in splits.items():
            values = dict(each)
            cells = [f"{values[column]:.2f}" if column in values else "–" for column in _COLUMNS]
            rows.append((run, name, f"{values['sentences']:.0f}", *cells))
            notes += [f"{run}, {name}: {note}" for note in each.notes]
    scores = next(iter(next(iter(evaluations.values())).values())).scores
    return Scores(
        columns=["run", "split", "#sentences", *(f"#{column}" for column in _COLUMNS)],
        rows=rows,
        notes=notes,
        lines=[f"bleu: {scores.signature}", f"chrf: {scores.chrf_signature}"],
        values={
            run: {
                name: {
                    **dict(each),
                    "signature": each.scores.signature,
                    "chrf_signature": each.scores.chrf_signature,
                    "notes": list(each.notes),
                }
                for name, each in splits.items()
            }
            for run, splits in evaluations.items()
        },
    )


def _pictures(
    network: Seq2Seq, files: TranslationFiles, samples: list[list[str]]
) -> list[tuple[str, Image.Image | Markup, str]]:
    pictures: list[tuple[str, Image.Image | Markup, str]] = []
    if (mixing := position_picture(network, files.longest)) is not None:
        caption = "Row t: the weights of all positions in position t; red is positive, blue negative, white zero."
        pictures.append(("Mixing of positions", mixing, caption))
    encode, most = files.vocabulary.encode, min(READABLE, network.config.max_length - 1)
    # Translations of the network, or references if none fits.
    pairs = [(encode(source), encode(translation)) for source, *both in samples for translation in reversed(both)]
    fitting = [pair for pair in pairs if all(1 <= len(side) <= most for side in pair)]
    if fitting:
        source, target = max(fitting, key=lambda pair: len(pair[0]) + len(pair[1]))
        names = [[files.vocabulary.piece(number) for number in side] for side in (source, target)]
        for layer, weights in enumerate(cross_attention(network, source, target), 1):
            caption = (
                "Attention to each subword of the source (columns) while a subword (row) is written; mean over heads."
            )
            pictures.append((f"Where decoder layer {layer} looks", attention_chart(weights, *names), caption))
    return pictures


class TranslationReporting(Reporting):
    """BLEU, samples of translations, and attention."""

    def metrics_text(self, metrics: Mapping[str, float]) -> str:
        return f"BLEU {metrics['bleu']:.2f}, chrF {metrics['chrf']:.2f}, {metrics['exact']:.1f} % exact"

    def result_lines(self, plan: Any, report: TextEvaluation) -> Iterator[str]:
        del plan
        yield f"           {report.scores.signature}"

    def next_commands(self, plan: Any) -> Sequence[str]:
        run, text = shlex.quote(str(plan.folder)), shlex.quote(plan.settings.data_text)
        return f"patchloom translate {run} < source.txt", f"patchloom evaluate {run} --text {text}"

    def page(self, folder: Path, settings: ReportSettings) -> TaskPage:
        return translation_page(folder, settings.network)

    def evaluate(
        self, runs: Mapping[str, Path], data: str | None, *, split: str | None, device: str, **options: Any
    ) -> Scores:
        del options
        if data is None:
            first = next(iter(runs.values()))
            raise UsageError(f"{first} is a translator; pass a text: patchloom evaluate {first} --text TEXT")
        evaluations = {
            name: evaluate_text(load_translator(folder, device=device), data, split=split)
            for name, folder in runs.items()
        }
        return text_scores(evaluations)
