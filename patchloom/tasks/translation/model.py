"""Reading trained translators from run folders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from patchloom.models.seq2seq import Seq2Seq
from patchloom.tasks.task import ModelLoader
from patchloom.tasks.translation.run_files import VAL, VOCABULARY, load_seq2seq, read_translation_files, read_val
from patchloom.tasks.translation.translator import Translator, load_translator
from patchloom_runtime.errors import UsageError


class TranslatorLoader(ModelLoader):
    """Models that translate sentences."""

    def load_network(self, folder: Path) -> Seq2Seq:
        return load_seq2seq(folder)[0]

    def load(self, folder: Path, *, device: str = "auto") -> Translator:
        return load_translator(folder, device=device)

    def predictor(self, folder: Path, *, device: str = "auto") -> Any:
        """Raise UsageError: `predict` is about images."""
        del device
        raise UsageError(f"{folder} translates text, not images; use `patchloom translate` or `evaluate --text`")

    def open_artifact(self, folder: Path) -> Any:
        """Raise UsageError: `predict` is about images."""
        return self.predictor(folder)

    def readers(self, folder: Path) -> dict[str, Callable[[], object]]:
        return {VOCABULARY: lambda: read_translation_files(folder), VAL: lambda: read_val(folder)}
