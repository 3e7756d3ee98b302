"""Checksums made right again after a change, as a stranger would who made the folder."""

import hashlib
import json
from pathlib import Path
from typing import Any

from patchloom.runs import checksums, metrics
from patchloom.runs.weights import weights_digest
from patchloom_runtime.untrusted import own_sha256


def repair_run(folder: Path, file: Path) -> None:
    """Make the checksums of a changed file of a run right."""
    run = next(inside for inside in (folder / "run", folder / "translator") if inside.is_dir())
    if file.parent.parent.name == "checkpoints":
        _repair_checkpoint(file)
    elif file.name == "weights.safetensors":
        _repair_weights(file)
    elif file.name == "metrics.jsonl":
        lines = [_parsed(line) for line in file.read_bytes().splitlines()]
        told = [
            {name: value for name, value in line.items() if name not in ("crc32", "after")}
            for line in lines
            if isinstance(line, dict)
        ]
        for line in told:
            if isinstance(line.get("time"), dict):
                line["time"].pop("crc32", None)
        written = metrics.MetricsFile(file)
        written._last = 0
        file.write_bytes(b"".join(map(written._next, told)))
    elif file.name == checksums.FILE:
        values = _parsed(file.read_bytes())
        file.write_bytes(checksums._packed(values["sha256"]))
    else:
        known = _parsed((run / checksums.FILE).read_bytes())["sha256"]
        known[file.name] = [hashlib.sha256(file.read_bytes()).hexdigest()]
        (run / checksums.FILE).write_bytes(checksums._packed(known))
        if file.name == "vocabulary.model":
            config = json.loads((run / "config.json").read_bytes())
            config["vocabulary"] = known[file.name][0]
            (run / "config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n")
            repair_run(folder, run / "config.json")


def _parsed(data: bytes) -> Any:
    return json.loads(data)


def _repair_weights(file: Path) -> None:
    from safetensors.torch import load as unpack

    data = file.read_bytes()
    digest = weights_digest(unpack(data))
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = {"patchloom": json.dumps({"sha256": digest})}
    packed = json.dumps(header).encode()
    file.write_bytes(len(packed).to_bytes(8, "little") + packed + data[8 + length :])


def _repair_checkpoint(file: Path) -> None:
    manifest = file.parent / "manifest.json"
    digests = _parsed(manifest.read_bytes())["sha256"]
    if file != manifest:
        digests[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    from patchloom.runs.checkpoints import _manifest

    manifest.write_bytes(_manifest(digests))


def repair_index(folder: Path, file: Path) -> None:
    """Make the checksums in `index.json` right."""
    path = folder / "index" / "index.json"
    values = _parsed(path.read_bytes())
    if file != path:
        field = "vectors_sha256" if file.suffix == ".npy" else "rows_sha256"
        values["parts"][0][field] = hashlib.sha256(file.read_bytes()).hexdigest()
    values["own_sha256"] = own_sha256(values)
    path.write_text(json.dumps(values, indent=1) + "\n")


def repair_part(file: Path) -> None:
    """Make the checksums of a changed part of a check right."""
    line, _, content = file.read_bytes().partition(b"\n")
    values = _parsed(line)
    values["content_sha256"] = hashlib.sha256(content).hexdigest()
    values["own_sha256"] = own_sha256(values)
    file.write_bytes(json.dumps(values).encode() + b"\n" + content)
