"""Multi30k En-De: ResMLP and the Transformer of the same size, vocabulary, data and steps; scores and samples.

    python benchmarks/multi30k.py multi30k/ --out runs/multi30k            # train.en.gz, train.de.gz, val.*, test*.*
    python benchmarks/multi30k.py multi30k/ --out runs/multi30k --table    # of what is there already

Options after `--` go to every `patchloom train`. A run that is there already goes on or is left as it is.
"""

from itertools import islice
from pathlib import Path

from trainings import options_of, read, train

import patchloom
from patchloom.data.text.pairs import open_parallel
from patchloom.engine.display import duration
from patchloom.runs.run_metadata import read_run_metadata
from patchloom.tasks.translation.evaluation import evaluate_text

RUNS = {
    "resmlp": ("--model", "translation_resmlp_6"),
    "transformer": ("--model", "translation_transformer_base"),
}
DIRECTION = ("--set", "text.source=en", "--set", "text.target=de")
SAMPLES = 6


def main() -> None:
    """Train what was asked for, then tell."""
    parser = options_of(__doc__, RUNS)
    parser.add_argument("--split", default="test_2016_flickr")
    given, further = read(parser)
    for name in [] if given.table else given.only or RUNS:
        train(given.data, given.out / name, ["--recipe", "translation_small", *DIRECTION, *RUNS[name], *further])
    folders = {name: given.out / name for name in RUNS if (given.out / name / "run.json").exists()}
    tell(folders, str(given.data), given.split)


def tell(folders: dict[str, Path], data: str, split: str) -> None:
    """A line a run, then some sentences by all of them."""
    translators = {name: patchloom.load(folder) for name, folder in folders.items()}
    print("| network | parameters | epochs | BLEU | tokenised | lower-cased | chrF | time |")
    print("|---|---|---|---|---|---|---|---|")
    for name, translator in translators.items():
        found = evaluate_text(translator, data, split=split)[split]
        values, record = dict(found), read_run_metadata(folders[name])
        assert record is not None
        size = sum(p.numel() for p in translator.network.parameters()) / 1e6
        scores = " | ".join(f"{values[key]:.2f}" for key in ("bleu", "bleu_tokenised", "bleu_lowercase", "chrf"))
        print(f"| {name} | {size:.1f} M | {record.epochs} | {scores} | {duration(record.seconds)} |")
        print(f"<!-- {found.scores.signature} -->")
    pairs = list(islice(open_parallel(data, source="en", target="de").tests[split], SAMPLES))
    answers = {name: translator.translate([source for source, _ in pairs]) for name, translator in translators.items()}
    for (source, reference), *found in zip(pairs, *answers.values(), strict=True):
        print(f"\nen           {source}\nreference    {reference}")
        for name, best in zip(answers, found, strict=True):
            print(f"{name:<12} {best[0].text}")


if __name__ == "__main__":
    main()
