"""Check the files of benchmarks/results and render them as tables into the pages that have a place for them.

python tools/results.py           # render
python tools/results.py --check   # exit with 1 if a page is out of date
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIELDS = {
    "title": str, "unit": str, "better": str, "results": list, "date": str, "machine": str, "versions": dict,
    "commit": str, "command": str,
}  # fmt: skip
OPTIONAL = {"remark": str, "order": int}
PLACE = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def read(path: Path) -> dict[str, Any]:
    """Return a measurement. Raise ValueError, with the file's name, if its form is wrong."""
    result = json.loads(path.read_text("utf-8"))
    for name, kind in FIELDS.items():
        if not isinstance(result.get(name), kind) or not result[name]:
            raise ValueError(f"{path.name}: {name} is missing, empty or not of type {kind.__name__}")
    for name in set(result) - set(FIELDS):
        if name not in OPTIONAL or not isinstance(result[name], OPTIONAL[name]):
            raise ValueError(f"{path.name}: {name} is no field, or not of its type")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"]) or result["better"] not in ("higher", "lower"):
        raise ValueError(f"{path.name}: date is YYYY-MM-DD, better is higher or lower")
    for row in result["results"]:
        if not isinstance(row.get("value"), int | float) or not row.get("tool") or set(row) - {"tool", "value", "note"}:
            raise ValueError(f"{path.name}: a result has tool, value (a number) and optionally note")
    return result


def measurements() -> list[dict[str, Any]]:
    """Return all measurements in the order of the table."""
    return sorted(map(read, RESULTS.glob("*.json")), key=lambda each: (each.get("order", 99), each["title"]))


def summary() -> str:
    """Return one row per measurement: patchloom and the others."""
    lines = ["| measured | patchloom | others |", "|---|---|---|"]
    for each in measurements():
        own = "; ".join(_value(row, each["unit"]) for row in each["results"] if row["tool"] == "patchloom")
        others = "; ".join(
            f"{row['tool']}: {_value(row, each['unit'])}" for row in each["results"] if row["tool"] != "patchloom"
        )
        lines.append(f"| {each['title']}, {each['machine']} | {own} | {others} |")
    return "\n".join(lines) + "\n"


def details() -> str:
    """Return one section per measurement, with everything needed to repeat it."""
    parts = []
    for each in measurements():
        versions = ", ".join(f"{name} {version}" for name, version in each["versions"].items())
        rows = "\n".join(f"| {row['tool']} | {row['value']:,} | {row.get('note', '')} |" for row in each["results"])
        parts.append(
            f"### {each['title']}\n\n{each['date']}, {each['machine']}; {versions}; commit {each['commit']}. "
            f"{each.get('remark', '')}\n\n<!-- not run: a benchmark -->\n```bash\n{each['command']}\n```\n\n"
            f"| tool | {each['unit']} ({each['better']} is better) | |\n|---|---|---|\n{rows}\n"
        )
    return "\n".join(parts)


def _value(row: dict[str, Any], unit: str) -> str:
    if unit.startswith("%") and "note" in row:
        return str(row["note"])
    return f"{row['value']:,} {unit}" + (f", {row['note']}" if "note" in row else "")


def rendered(text: str) -> str:
    """Return a page with its tables of results renewed."""
    make = {"summary": summary, "details": details}
    return PLACE.sub(lambda place: place[1] + make[place[2]]() + place[3], text)


def main(arguments: list[str]) -> int:
    """Render the pages, or compare them."""
    stale = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text("utf-8")
        if (new := rendered(text)) != text:
            stale.append(path)
            if "--check" not in arguments:
                path.write_text(new, "utf-8")
    for path in stale:
        print(path.relative_to(ROOT))
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
