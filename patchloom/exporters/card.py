"""`README.md` of an artefact: what it is, how it compares with its run, how it is used."""

from typing import TYPE_CHECKING

from patchloom.exporters.parity import columns

if TYPE_CHECKING:
    from patchloom.exporters.export import Exported
    from patchloom.exporters.subject import ExportSubject


def artifact_card(subject: "ExportSubject", outputs: tuple[str, ...], exported: "Exported") -> str:
    """The text of the card."""
    head = [column.removeprefix("#") for column in columns(exported.measure, exported.compared)]
    table = [head, ["---", *["---:"] * (len(head) - 2), "---"], *(row.cells() for row in exported.rows)]
    lines = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    return f"""---
library_name: patchloom
tags: [patchloom, {exported.to}]
---

# {subject.network}, {exported.to} {exported.precision}

{subject.answers}

Compared with the run on {exported.images:,} {exported.compared}, on the machine that exported it:

{lines}

{subject.in_words(outputs)}

```python
import patchloom_runtime  # numpy, Pillow and the format's own package; or patchloom.load, the same

model = patchloom_runtime.load("this/folder")
{subject.use}
```
"""
