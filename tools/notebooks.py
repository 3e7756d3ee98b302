"""Turn a tutorial into a notebook: Python blocks and commands become cells, the text stays the same.

python tools/notebooks.py docs/tutorials/search.md search.ipynb
"""

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"(?ms)^(?:<!-- (?P<comment>[^>]*) -->\n)?```(?P<language>python|bash)\n(?P<code>.*?)^```\n?")


def notebook(markdown: str) -> str:
    """Return the notebook of a tutorial as JSON (nbformat 4.5)."""
    cells: list[dict[str, Any]] = []
    end = 0
    for block in BLOCK.finditer(markdown):
        _add_text(cells, markdown[end : block.start()])
        end = block.end()
        if (block["comment"] or "").startswith("not run"):
            _add_text(cells, block[0])
            continue
        lines = block["code"].rstrip("\n")
        _add(cells, "code", f"%%bash\n{lines}" if block["language"] == "bash" else lines)
    _add_text(cells, markdown[end:])
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def _add_text(cells: list[dict[str, Any]], text: str) -> None:
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL).strip()
    if text:
        _add(cells, "markdown", text)


def _add(cells: list[dict[str, Any]], kind: str, source: str) -> None:
    number = f"{len(cells)} {source}".encode()
    cell: dict[str, Any] = {"cell_type": kind, "id": hashlib.sha256(number).hexdigest()[:12], "metadata": {}}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    cells.append(cell | {"source": source.splitlines(keepends=True)})


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(notebook(Path(sys.argv[1]).read_text("utf-8")), "utf-8")
