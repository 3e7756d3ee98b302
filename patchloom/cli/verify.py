"""`patchloom verify RUN|INDEX|ARTIFACT`: check that every file is as it was written."""

from dataclasses import dataclass
from typing import Annotated

import typer

from patchloom.cli.options import Json
from patchloom.options import Argument, Option


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    folder: Annotated[
        str,
        Argument("Run, index or artifact folder.", metavar="RUN|INDEX|ARTIFACT", complete="run"),
    ]
    accept: Annotated[
        bool, Option("Accept text files that were edited by hand, such as class names, before verifying.")
    ] = False
    key: Annotated[
        str | None,
        Option("File with a public key (PEM): also check the signature of `patchloom sign`.", metavar="PUB.pem"),
    ] = None
    as_json: Json = False


def verify(options: VerifyOptions) -> None:
    """Compare all files with their checksums, and with --key with their signature. Exits with 4 if one differs.

    patchloom verify runs/photos --key pub.pem
    """
    from patchloom.cli.output import print_json, print_result
    from patchloom.tasks.verify import verify as verify_folder
    from patchloom_runtime.errors import CheckpointError
    from patchloom_runtime.printable import printable

    report = verify_folder(options.folder, accept=options.accept, key=options.key)
    if options.as_json:
        wrong = [{"file": name, "reason": reason} for name, reason in report.wrong.items()]
        print_json(
            {
                "folder": options.folder,
                "kind": report.kind,
                "checked": report.checked,
                "accepted": report.accepted,
                "without_checksum": report.without_checksum,
                "missing": report.missing,
                "wrong": wrong,
            }
        )
    else:
        for name in report.accepted:
            print_result(f"accepted   {name}")
        for reason in report.wrong.values():
            print_result(f"wrong      {printable(reason)}")
        for name in report.missing:
            print(f"note: {name} is missing; it may not have been written yet")
        if report.without_checksum:
            names = ", ".join(report.without_checksum)
            print(f"note: files older than checksums, in which a changed byte would not be noticed: {names}")
        if not report.wrong:
            signed = f", and signed with the private key of {printable(options.key)}" if options.key else ""
            print_result(
                f"{printable(options.folder)}: {len(report.checked):,} files, all as they were written{signed}"
            )
    if report.wrong:
        raise typer.Exit(CheckpointError.exit_code)
