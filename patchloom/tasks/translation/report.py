"""The results of a translator in words, pages and tables."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from patchloom.tasks.report import ReportSettings
from patchloom.tasks.task import Reporting, Scores, TaskPage
from patchloom.tasks.translation.evaluation import TextEvaluation, evaluate_text
from patchloom.tasks.translation.page import text_scores, translation_page
from patchloom.tasks.translation.translator import load_translator
from patchloom_runtime.errors import UsageError


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
