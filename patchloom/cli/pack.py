"""`patchloom pack DATA --out SHARDS`: a dataset as tar shards, in a folder or a bucket."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from patchloom.cli.options import Json, OmitFields, keywords
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.options import Argument, Option


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    data: Annotated[str, Argument("Folder, or any other data that `train` takes.", metavar="DATA")]
    out: Annotated[str, Option("Folder, or address in a bucket: s3://bucket/flowers.", metavar="SHARDS")]
    shard_size: Annotated[int, Option("Size in MiB from which the next shard begins.", metavar="MIB", minimum=1)] = 128
    dry_run: Annotated[bool, Option("Count images and classes; write nothing.")] = False
    reading: Annotated[Reading, OmitFields(("masks", "boxes", "ignore", "val"))] = AS_IT_IS
    as_json: Json = False


def pack(options: PackOptions) -> None:
    """Write images with classes as tar shards that `train` reads from a folder or a bucket. The same command resumes.

    patchloom pack flowers/ --out s3://bucket/flowers

    patchloom train s3://bucket/flowers
    """
    from patchloom.cli.output import print_json, print_result, refuse_inside
    from patchloom.data.checking.scan import scan_bar
    from patchloom.data.packing import pack as pack_data
    from patchloom.data.sources.specs import is_url
    from patchloom_runtime.printable import plural, printable

    if not is_url(options.out):
        refuse_inside(Path(options.out).expanduser(), options.data, what="folder")
    with scan_bar(what="packing") as progress:
        packed = pack_data(**keywords(options), progress=progress)
    if options.as_json:
        print_json(asdict(packed))
        return
    for note in packed.notes:
        print(f"note: {note}")
    counts = ", ".join(f"{split} {count:,}" for split, count in packed.splits.items())
    contents = f"{counts} images, {plural(len(packed.classes), 'class')}"
    if options.dry_run:
        print_result(f"{contents} would be packed into {printable(packed.out)}")
        print("Nothing was written.   Next: the same command without --dry-run")
        return
    mib = sum(shard.bytes for shard in packed.shards) / (1 << 20)
    existing = sum(not shard.written for shard in packed.shards)
    more = f", {existing} of them existed" if existing else ""
    print_result(f"{printable(packed.out)}: {contents} in {plural(len(packed.shards), 'shard')}, {mib:,.1f} MiB{more}")
    print(f"Next: patchloom train {printable(packed.out)}")
