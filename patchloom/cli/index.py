"""`patchloom index RUN IMAGES… --out INDEX`: a collection of images that can be searched by image."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from patchloom.cli.options import Batch, Device, DryRun, Json, OmitFields, Trunk, Workers, keywords
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.options import HARDWARE, Argument, Option

if TYPE_CHECKING:
    from patchloom.inference.index_build import BuildSummary


@dataclass(frozen=True, kw_only=True)
class IndexOptions:
    model: Annotated[str, Argument("Run folder, resmlp_s12:in1k, or hub:user/name.", metavar="RUN", complete="run")]
    images: Annotated[list[str], Argument("Image files or folders, labeled as `train` reads them.")]
    out: Annotated[str, Option("Index folder, or address in a bucket. New images are added if it exists.")]
    device: Device = "auto"
    exact: Annotated[bool, Option("Compare queries with all files. Default: approximate search beyond a million.")] = (
        False
    )
    prune: Annotated[bool, Option("Drop files that are gone from these folders.")] = False
    trunk: Trunk = False
    level: Annotated[str | None, Option("Label level of search results. Default: the run's.")] = None
    part: Annotated[
        str | None, Option("Embed one of several shares of the files, such as 3/8, for --join.", metavar="I/N")
    ] = None
    join: Annotated[bool, Option("Join the shares that were made with --part.")] = False
    engine: Annotated[Literal["local", "ray"], Option("ray embeds tar shards on a Ray cluster.", panel=HARDWARE)] = (
        "local"
    )
    dry_run: DryRun = False
    reading: Annotated[
        Reading, OmitFields(("images", "masks", "boxes", "ignore", "names", "exclude", "corrections", "val"))
    ] = AS_IT_IS
    batch: Batch = 64
    workers: Workers = 0
    as_json: Json = False


def index(options: IndexOptions) -> None:
    """Embed images for `patchloom search`. The same command resumes, or adds new and changed files.

    patchloom index runs/photos photos/ --out photos.index
    """
    from patchloom.cli.output import print_json
    from patchloom.data.checking.scan import scan_bar
    from patchloom.inference.index_build import index as build_index

    if options.dry_run:
        _print_plan(options)
        return
    with scan_bar(what="embedding") as progress:
        built = build_index(progress=progress, **keywords(options, "dry_run"))
    if options.as_json:
        print_json(_as_json(built, options.out))
    else:
        _print(built, options)


def _print_plan(options: IndexOptions) -> None:
    from patchloom.cli.output import print_json, print_result
    from patchloom.data.sources.specs import is_url
    from patchloom.inference.classifier import load
    from patchloom.inference.index_build import collect, shards_of
    from patchloom.inference.index_files import FILE, read_about
    from patchloom.inference.shard_parts import ShardEmbedder, ShardJob
    from patchloom_runtime.errors import UsageError

    if missing := [path for path in options.images if not (is_url(path) or Path(path).exists())]:
        raise UsageError(f"{missing[0]}: no such file or folder")
    if shards := shards_of(options.images):
        job = ShardJob(options.model, options.out, options.device, options.trunk, options.reading, options.batch)
        waiting = len(ShardEmbedder(job).missing(shards))
        if options.as_json:
            print_json({"index": options.out, "shards": len(shards), "shards_missing": waiting})
            return
        print_result(f"{waiting:,} of {len(shards):,} shards would be embedded by {options.model} into {options.out}")
        print("Nothing was written.   Next: the same command without --dry-run")
        return
    classifier = load(options.model, device=options.device)
    files = collect(options.images, classifier, reading=options.reading, level=options.level).files
    folder = Path(options.out)
    before = len(read_about(folder)) if (folder / FILE).is_file() else 0
    if options.as_json:
        print_json({"index": options.out, "images": len(files), "files_before": before})
        return
    print_result(f"{len(files):,} image files would be embedded by {options.model} into {options.out}")
    if before:
        print_result(f"{options.out} already holds {before:,} files; those that did not change are skipped")
    print("Nothing was written.   Next: the same command without --dry-run")


def _as_json(built: "BuildSummary", out: str) -> dict[str, Any]:
    from patchloom.data.labels.taxonomy import FINEST

    about = built.index.about
    return {
        "index": out,
        "files": len(about),
        "embedded": built.embedded,
        "unchanged": built.unchanged,
        "gone": built.gone,
        "labels": built.index.labels,
        "level": about.level or FINEST,
        "levels": _levels(built),
        "exact": about.exact,
        "unreadable": list(built.unreadable.values()),
    }


def _levels(built: "BuildSummary") -> dict[str, int]:
    """Return the number of labels at each level."""
    from patchloom.data.labels.taxonomy import FINEST

    about = built.index.about
    return {name or FINEST: len(about.labels_at(name)) for name in ("", *about.levels)}


def _print(built: "BuildSummary", options: IndexOptions) -> None:
    from patchloom.cli.output import print_result
    from patchloom.data.labels.taxonomy import FINEST

    about = built.index.about
    for fault in built.unreadable.values():
        print_result(f"left out: {fault}")
    method = "exact search"
    if about.lists is not None:
        method = f"approximate search, recall {about.lists.settings.recall:.3f}"
    labels = f", {len(built.index.labels):,} labels" if about.labels else ""
    if about.levels:
        counts = ", ".join(f"{name}: {count:,}" for name, count in _levels(built).items())
        labels += f" at level {about.level or FINEST} (of {counts})"
    gone = f", {built.gone:,} gone" if options.prune else ""
    print_result(f"{built.embedded:,} embedded, {built.unchanged:,} unchanged{gone}")
    print_result(f"{options.out}: {len(about):,} files{labels}, vectors of {about.dimension}, {method}")
