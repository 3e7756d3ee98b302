"""`patchloom evaluate RUN… --text TEXT`: the scores of translation runs."""

_COLUMNS = ("bleu", "bleu_tokenised", "bleu_lowercase", "bleu_compound", "chrf", "exact", "loss", "perplexity")


def text_of(paths: list[str], text: str | None) -> tuple[list[str], str] | None:
    """The runs and the text, given by --text or as the last of the paths; None where the runs are about images."""
    from pathlib import Path

    from patchloom.deployment.translation_files import translates_text
    from patchloom.errors import UsageError

    if text is not None:
        return paths, text
    if not any(translates_text(Path(path)) for path in paths):
        return None
    if len(paths) > 1 and not translates_text(Path(paths[-1])):
        return paths[:-1], paths[-1]
    raise UsageError(f"{paths[0]} translates; say what: patchloom evaluate {paths[0]} --text TEXT")


def evaluate_text_runs(runs: list[str], text: str, *, split: str | None, device: str, as_json: bool) -> None:
    """One row a run and split."""
    from patchloom.cli.output import print_json, print_result
    from patchloom.cli.table import print_table
    from patchloom.deployment.runs import named
    from patchloom.deployment.text_evaluation import evaluate_text
    from patchloom.deployment.translator import load_translator

    found = {
        name: evaluate_text(load_translator(folder, device=device), text, split=split)
        for name, folder in named(runs).items()
    }
    if as_json:
        told = {
            run: {
                name: {**dict(each), "signature": each.scores.signature, "chrf_signature": each.scores.chrf_signature,
                       "notes": list(each.notes)}
                for name, each in splits.items()
            }
            for run, splits in found.items()
        }  # fmt: skip
        print_json(told)
        return
    rows = []
    for run, splits in found.items():
        for name, each in splits.items():
            values = dict(each)
            cells = [f"{values[column]:.2f}" if column in values else "–" for column in _COLUMNS]
            rows.append((run, name, f"{values['sentences']:.0f}", *cells))
            for note in each.notes:
                print(f"note: {run}, {name}: {note}")
    print_table(["run", "split", "#sentences", *(f"#{column}" for column in _COLUMNS)], rows)
    scores = next(iter(next(iter(found.values())).values())).scores
    print_result(f"bleu: {scores.signature}\nchrf: {scores.chrf_signature}")
