"""`patchloom sign RUN|INDEX|ARTIFACT`: sign all files of a folder with a private key."""

import shlex
from dataclasses import dataclass
from typing import Annotated

from patchloom.cli.options import Json
from patchloom.options import Argument, Option


@dataclass(frozen=True, kw_only=True)
class SignOptions:
    folder: Annotated[
        str,
        Argument("Run, index or artifact folder.", metavar="RUN|INDEX|ARTIFACT", complete="run"),
    ]
    key: Annotated[str, Option("File with a private elliptic-curve key (PEM).", metavar="KEY.pem")]
    as_json: Json = False


def sign(options: SignOptions) -> None:
    """Verify all files and sign them, in model.sig (OpenSSF model signing). Sign again after a change.

    patchloom sign runs/photos --key key.pem

    Make a key with: openssl ecparam -name prime256v1 -genkey -noout -out key.pem
    """
    from patchloom.cli.output import print_json, print_result
    from patchloom.runs.signature import FILE
    from patchloom.tasks.verify import sign as sign_folder
    from patchloom_runtime.printable import printable

    report = sign_folder(options.folder, key=options.key)
    if options.as_json:
        print_json({"folder": options.folder, "kind": report.kind, "signature": FILE})
    else:
        print_result(f"{printable(options.folder)}: all files signed in {FILE}")
        print(f"Next: patchloom verify {shlex.quote(options.folder)} --key PUB.pem")
