"""Names that a server goes by, and a first look at what it is given."""

import ipaddress
import os
from collections.abc import Sequence

from patchloom_runtime.errors import UsageError

NO_IMAGES = "note: images of the index are not shown: it can name any file. Add --images FOLDER for each folder to show"


def served_name(source: str) -> str:
    """What clients call the model: the name of its folder, in letters that a URL has."""
    name = os.path.basename(os.path.realpath(source)) if os.path.isdir(source) else source
    plain = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_.") else "-" for letter in name)
    return plain.strip(".") or "model"


def check_model_path(source: str) -> None:
    """A UsageError where nothing can be served, before any process is started; names of weights are looked up later."""
    if os.path.isdir(source):
        files = ("config.json", "index.json", "artifact.json")
        if not any(os.path.isfile(os.path.join(source, file)) for file in (*files, "artefact.json")):
            raise UsageError(f"{source} is neither a run nor an artifact or index: it has none of {', '.join(files)}")
    elif ":" not in source:
        raise UsageError(
            f"{source} does not exist; give a run, an artefact, an index, or weights such as resmlp_s12:in1k"
        )


def image_roots(source: str, images: Sequence[str]) -> list[str]:
    """Real paths of the folders that images of an index may be shown from; a UsageError where there is none."""
    if images and not os.path.isfile(os.path.join(source, "index.json")):
        raise UsageError(f"--images names folders of an index's images; {source} is no index")
    for folder in images:
        if not os.path.isdir(folder):
            raise UsageError(f"{folder}, which --images names, is no folder; give the folder of the index's images")
    return [os.path.realpath(folder) for folder in images]


def is_local(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
