"""The vocabulary of a translation run. It is learned once, from the training sentences, and then kept in its folder."""

import hashlib
from pathlib import Path

from patchloom.data.text.encoded import learn_vocabulary
from patchloom.data.text.pairs import Pairs
from patchloom.runs.config import read_config
from patchloom.tasks.translation.run_files import VOCABULARY, read_translation_files, read_vocabulary
from patchloom_runtime.errors import CheckpointError
from patchloom_runtime.text.vocabulary import Vocabulary


def vocabulary_of_run(folder: Path, init: str | None, train: Pairs, size: int) -> Vocabulary:
    """Read the vocabulary in the run folder or that of --init, else learn one."""
    checksum = read_config(folder).get("vocabulary") if (folder / "config.json").is_file() else None
    if (folder / VOCABULARY).is_file():
        return read_vocabulary(folder, checksum)
    if init:
        return read_translation_files(Path(init)).vocabulary
    learned = learn_vocabulary(train, size)
    if checksum and hashlib.sha256(learned.to_bytes()).hexdigest() != checksum:
        raise CheckpointError(
            f"{folder / VOCABULARY} is lost, and the text has changed since it was learned. Restore the file, "
            "or pass a new folder with --out."
        )
    return learned
