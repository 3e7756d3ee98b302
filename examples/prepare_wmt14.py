"""Make train, val and test of the official files of WMT'14, in the form that `patchloom train` reads.

    python examples/prepare_wmt14.py FOLDER [--pair en-de|en-fr] [--out wmt14-en-de] [--val-every N]

FOLDER holds the unpacked official archives, in any folders below it; nothing is downloaded. docs/translation.md lists
the archives. `--val-every N` makes every N-th line of train val, instead of the pair's usual val.
"""

import argparse
from pathlib import Path

from patchloom.data.text.wmt import prepare_wmt14


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare WMT'14 for patchloom train.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pair", choices=("en-de", "en-fr"), default="en-de")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--val-every", type=int)
    options = parser.parse_args()
    out = options.out or Path(f"wmt14-{options.pair}")
    prepared = prepare_wmt14(options.folder, options.pair, out, val_every=options.val_every)
    for reason, count in prepared.left_out.items():
        print(f"left out   {count:,} pairs of train: {reason} (left_out.tsv)")
    print(f"{out}: sentence pairs, {', '.join(f'{split} {count:,}' for split, count in prepared.counts.items())}")
    print(f"Next: patchloom train {out} --recipe translation_resmlp")


if __name__ == "__main__":
    main()
