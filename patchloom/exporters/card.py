"""The model card (`README.md`) of an artifact."""

from typing import TYPE_CHECKING

from patchloom.exporters.parity import columns

if TYPE_CHECKING:
    from patchloom.exporters.artifact import Exported
    from patchloom.exporters.subject import ExportSubject


def artifact_card(subject: "ExportSubject", outputs: tuple[str, ...], exported: "Exported") -> str:
    """Return the text of the card: the model, its comparison with the run, and how to use it."""
    head = [column.removeprefix("#") for column in columns(exported.measure, exported.compared)]
    table = [head, ["---", *["---:"] * (len(head) - 2), "---"], *(row.cells() for row in exported.rows)]
    lines = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    return f"""---
library_name: patchloom
tags: [patchloom, {exported.to}]
---

# {subject.network}, {exported.to} {exported.precision}

{subject.summary}

Compared with the run on {exported.images:,} {exported.compared}, on the machine that exported it:

{lines}

{subject.describe_graphs(outputs)}

```python
import patchloom_runtime  # needs numpy, Pillow and the engine; patchloom.load does the same

model = patchloom_runtime.load("this/folder")
{subject.usage}
```
"""
