"""Check the files of benchmarks/results and render them as tables into the pages that have a place for them.

python tools/results.py               # check every file and render the pages
python tools/results.py --check       # exit with 1 if a file is wrong or a page is out of date
python tools/results.py FILE.json …   # check these files alone
"""

import json
import math
import re
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLACE = re.compile(r"(<!-- results: ([\w ]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
VERDICTS = ("confirmed", "contradicted", "undecided", "not tested")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_line(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and "\n" not in value and "```" not in value


def _is_text(value: object) -> bool:
    return _is_line(value) and not set("|<>") & set(str(value))


def _is_day(value: object) -> bool:
    if not isinstance(value, str) or not re.fullmatch(r"\d{4}-\d\d-\d\d", value):
        return False
    try:
        return bool(date.fromisoformat(value))
    except ValueError:
        return False


def _is_list(value: object, of: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(map(of, value))


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


# Kind of a field → the value that is expected, and its test.
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "text": ("one line of text without |, < and >, which tables and pages cannot hold", _is_text),
    "command": ("one line", _is_line),
    "date": ("a day, YYYY-MM-DD", _is_day),
    "commit": ("7 to 40 hex digits", lambda v: _is_text(v) and bool(re.fullmatch(r"[0-9a-f]{7,40}", v))),
    "sha256": ("64 hex digits", lambda v: _is_text(v) and bool(re.fullmatch(r"[0-9a-f]{64}", v))),
    "versions": (
        "packages with their versions",
        lambda v: isinstance(v, dict) and bool(v) and all(map(_is_text, v.values())),
    ),
    "direction": ("higher or lower", lambda v: v in ("higher", "lower")),
    "verdict": (" or ".join(VERDICTS), lambda v: v in VERDICTS),
    "count": ("a whole number above 0", _is_count),
    "order": ("a whole number", lambda v: type(v) is int),
    "number": ("a number", _is_number),
    "seeds": (
        "a list of different whole numbers",
        lambda v: _is_list(v, lambda seed: type(seed) is int) and len(set(v)) == len(v),
    ),
    "values": ("a list of numbers, one per seed", lambda v: _is_list(v, _is_number)),
    "interval": (
        "two numbers, the lower one first",
        lambda v: _is_list(v, _is_number) and len(v) == 2 and v[0] <= v[1],
    ),
    "rows": ("a list of objects", lambda v: _is_list(v, lambda row: isinstance(row, dict))),
    "reasons": (
        "fields that are null, each with a reason",
        lambda v: isinstance(v, dict) and all(map(_is_text, v.values())),
    ),
}
# Form of a file → kind per field. A "?" marks a field that may be left out.
MEASUREMENT = {
    "title": "text", "unit": "text", "better": "direction", "results": "rows", "date": "date", "machine": "text",
    "versions": "versions", "commit": "commit", "command": "command", "remark": "text?", "order": "order?",
}  # fmt: skip
MEASUREMENT_ROW = {"tool": "text", "value": "number", "note": "text?"}
NETWORK = {
    "network": "text", "description": "text", "recipe": "text", "dataset": "text", "resolution": "count",
    "parameters": "count", "epochs": "count", "seeds": "seeds", "metric": "text", "better": "direction",
    "selection": "text", "values": "values", "interval": "interval", "interval_of": "text", "date": "date",
    "machine": "text", "versions": "versions", "commit": "commit", "command": "command", "log_sha256": "sha256",
    "missing": "reasons?", "remark": "text?",
}  # fmt: skip
MAY_BE_NULL = ("resolution", "parameters", "epochs", "seeds", "interval", "interval_of", "commit", "log_sha256")
CLAIMS = {"page": "text", "claims": "rows"}
CLAIM = {
    "claim": "text", "place": "text", "published": "text", "verdict": "verdict", "here": "text?", "seeds": "text?",
    "evidence": "text?",
}  # fmt: skip


# Checks ---------------------------------------------------------------------------------------------------------------


def _check_fields(entry: dict[str, Any], form: dict[str, str], name: str, nulls: tuple[str, ...] = ()) -> None:
    for field in entry:
        if field not in form:
            raise ValueError(f"{name}: there is no field {field!r}; the fields are {', '.join(form)}")
    for field, kind in form.items():
        if field not in entry:
            if not kind.endswith("?"):
                raise ValueError(f"{name}: the field {field!r} is missing")
            continue
        expected, fits = KINDS[kind.rstrip("?")]
        if not (entry[field] is None and field in nulls) and not fits(entry[field]):
            given = json.dumps(entry[field], ensure_ascii=False)[:60]
            raise ValueError(f"{name}: {field!r} is {given}, expected {expected}")


def _check_measurement(entry: dict[str, Any], name: str) -> None:
    _check_fields(entry, MEASUREMENT, name)
    for number, row in enumerate(entry["results"], 1):
        _check_fields(row, MEASUREMENT_ROW, f"{name}, result {number}")


def _check_network(entry: dict[str, Any], name: str) -> None:
    _check_fields(entry, NETWORK, name, MAY_BE_NULL)
    empty = {field for field in MAY_BE_NULL if entry[field] is None}
    if empty != set(entry.get("missing", {})):
        raise ValueError(
            f"{name}: 'missing' must give the reason for each field that is null: {sorted(empty)}, "
            f"it has {sorted(entry.get('missing', {}))}"
        )
    if entry["seeds"] is not None and len(entry["seeds"]) != len(entry["values"]):
        raise ValueError(
            f"{name}: {len(entry['values'])} values for {len(entry['seeds'])} seeds, expected one per seed"
        )
    if entry["metric"].startswith("%") and not all(0 <= value <= 100 for value in entry["values"]):
        raise ValueError(f"{name}: 'values' are {entry['values']}, expected percentages from 0 to 100")
    if entry["interval"] is not None and not entry["interval"][0] <= mean(entry) <= entry["interval"][1]:
        raise ValueError(f"{name}: the mean {mean(entry):g} is outside of the interval {entry['interval']}")


def _check_claims(entry: dict[str, Any], name: str) -> None:
    _check_fields(entry, CLAIMS, name)
    for number, claim in enumerate(entry["claims"], 1):
        _check_fields(claim, CLAIM, f"{name}, claim {number}")
        missing = [field for field in ("here", "seeds", "evidence") if field not in claim]
        if (claim["verdict"] == "not tested") != bool(missing) or len(missing) not in (0, 3):
            raise ValueError(f"{name}, claim {number}: a tested claim, and no other, has here, seeds and evidence")


CHECKS = {"results": _check_measurement, "networks": _check_network, "claims": _check_claims}


def read(path: Path) -> dict[str, Any]:
    """Return the contents of a file. Raise ValueError, with the file's name, if its form is wrong.

    The folder decides the form: `networks`, `claims` or `results`; anywhere else, the fields do.
    """
    try:
        entry = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name}: it cannot be read as JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{path.name}: a file has one JSON object")
    kind = "networks" if "network" in entry else "claims" if "claims" in entry else "results"
    CHECKS[path.parent.name if path.parent.name in CHECKS else kind](entry, path.name)
    return entry


def mean(network: dict[str, Any]) -> float:
    """Return the mean over seeds of a trained network."""
    return sum(network["values"]) / len(network["values"])


# Tables ---------------------------------------------------------------------------------------------------------------


def measurements() -> list[dict[str, Any]]:
    """Return all measurements in the order of the table."""
    return sorted(map(read, RESULTS.glob("*.json")), key=lambda each: (each.get("order", 99), each["title"]))


def networks() -> list[dict[str, Any]]:
    """Return all trained networks by dataset, the best first, each with the name of its file."""
    entries = [read(path) | {"name": path.stem} for path in (RESULTS / "networks").glob("*.json")]
    return sorted(entries, key=lambda n: (n["dataset"], n["metric"], -mean(n) if n["better"] == "higher" else mean(n)))


def claims() -> dict[str, list[dict[str, str]]]:
    """Return page → its claims."""
    entries = [read(path) for path in sorted((RESULTS / "claims").glob("*.json"))]
    return {entry["page"]: entry["claims"] for entry in entries}


def summary() -> str:
    """Return one row per measurement: patchloom and the others."""
    lines = ["| measured | patchloom | others |", "|---|---|---|"]
    for each in measurements():
        own, others = [], []
        for row in each["results"]:
            tool, _, case = row["tool"].partition(", ")  # "patchloom" or "patchloom, one query"
            name = case if tool == "patchloom" else row["tool"]
            text = f"{name}: {_value(row, each['unit'])}" if name else _value(row, each["unit"])
            (own if tool == "patchloom" else others).append(text)
        lines.append(f"| {each['title']}, {each['machine']} | {'; '.join(own)} | {'; '.join(others)} |")
    return "\n".join(lines) + "\n"


def _value(row: dict[str, Any], unit: str) -> str:
    if unit.startswith("%") and "note" in row:
        return str(row["note"])
    return f"{row['value']:,} {unit}" + (f", {row['note']}" if "note" in row else "")


def details() -> str:
    """Return one section per measurement, with everything needed to repeat it."""
    parts = []
    for each in measurements():
        rows = "\n".join(f"| {row['tool']} | {row['value']:,} | {row.get('note', '')} |" for row in each["results"])
        parts.append(
            f"### {each['title']}\n\n{_origin(each)} {each.get('remark', '')}\n\n{_block(each)}\n"
            f"| tool | {each['unit']} ({each['better']} is better) | |\n|---|---|---|\n{rows}\n"
        )
    return "\n".join(parts)


def _origin(entry: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
    return f"{entry['date']}, {entry['machine']}; {versions}; commit {entry['commit']}."


def _block(entry: dict[str, Any]) -> str:
    return f"<!-- not run: a benchmark -->\n```bash\n{entry['command']}\n```\n"


def leaderboard() -> str:
    """Return one table of trained networks per dataset."""
    parts = []
    for dataset in dict.fromkeys(each["dataset"] for each in networks()):
        lines = [
            "| network | parameters | pixels | epochs | seeds | result | interval |",
            "|---|---|---|---|---|---|---|",
        ]
        for each in (each for each in networks() if each["dataset"] == dataset):
            low, high = each["interval"] or ("", "")
            parameters = f"{each['parameters'] / 1e6:.1f} M" if each["parameters"] else "–"
            lines.append(
                f"| [{each['network']}](#{each['name']}) | {parameters} | {each['resolution'] or '–'} "
                f"| {each['epochs'] or '–'} | {len(each['seeds']) if each['seeds'] else '–'} "
                f"| {mean(each):.4g} {each['metric']} | {f'{low:.1f} … {high:.1f}' if each['interval'] else '–'} |"
            )
        parts.append(f"### {dataset}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def trained() -> str:
    """Return one section per trained network, with everything needed to train it again."""
    parts = []
    for each in networks():
        facts = [
            f"{each['network']} on {each['dataset']}: {each['description']}; recipe `{each['recipe']}`.",
            f"{each['selection']}.",
        ]
        if each["interval_of"]:
            facts.append(f"The interval is that {each['interval_of']}.")
        if len(each["values"]) > 1:
            facts.append(f"By seed {each['seeds']}: {each['values']}.")
        if each["log_sha256"]:
            facts.append(f"SHA-256 of `metrics.jsonl`: `{each['log_sha256']}`.")
        reasons: dict[str, list[str]] = {}
        for field, reason in each.get("missing", {}).items():
            reasons.setdefault(reason, []).append(f"`{field}`")
        if reasons:
            listed = "; ".join(f"{', '.join(fields)} ({reason})" for reason, fields in reasons.items())
            facts.append(f"Not on record: {listed}.")
        if "remark" in each:
            facts.append(each["remark"])
        parts.append(
            f"### {each['name']}\n\n{_origin(each)} {' '.join(facts)}\n\n"
            f"<!-- not run: trains for minutes to hours -->\n```bash\n{each['command']}\n```\n"
        )
    return "\n".join(parts)


def claims_of(page: str) -> str:
    """Return the table of one page's claims: the published numbers, those measured here, and the verdict."""
    tested = [each for each in claims()[page] if each["verdict"] != "not tested"]
    untested = [each for each in claims()[page] if each["verdict"] == "not tested"]
    parts = []
    if tested:
        rows = [
            f"| {each['claim']} | {each['place']}: {each['published']} | {each['here']} | {each['seeds']} "
            f"| *{each['verdict']}*; {each['evidence']} |"
            for each in tested
        ]
        head = "| claim | published | measured here | seeds | verdict and evidence |\n|---|---|---|---|---|\n"
        parts.append(head + "\n".join(rows) + "\n")
    if untested:
        rows = [f"| {each['claim']} | {each['place']} | {each['published']} |" for each in untested]
        parts.append(
            "*Not tested* here so far:\n\n| claim | place | published |\n|---|---|---|\n" + "\n".join(rows) + "\n"
        )
    return "\n".join(parts)


def claims_of_all() -> str:
    """Return the number of claims by verdict and page, and one table of the tested claims of all pages per verdict."""
    every = [(page, each) for page, entries in claims().items() for each in entries]
    rows = [f"| [{_title(page)}]({page}.md) | {_counts(entries)} |" for page, entries in claims().items()]
    rows.append(f"| **all {len(every)} claims** | {_counts([each for _, each in every])} |")
    head = f"| | {' | '.join(VERDICTS)} |\n|---|{'---|' * len(VERDICTS)}\n"
    parts = [head + "\n".join(rows) + "\n"]
    for verdict in VERDICTS[:-1]:
        rows = [
            f"| {each['claim']} | [{each['place']}]({page}.md#what-was-measured-here) "
            f"| {each['seeds']} | {_remark(each)} |"
            for page, each in every
            if each["verdict"] == verdict
        ]
        head = "| claim | paper | seeds | remark |\n|---|---|---|---|\n"
        parts.append(f"### {verdict.capitalize()}\n\n{head}" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _title(page: str) -> str:
    """Return the title of a paper's page."""
    text = (ROOT / "docs" / "papers" / f"{page}.md").read_text("utf-8")
    return text.partition("\n")[0].removeprefix("# ")


def _counts(entries: list[dict[str, str]]) -> str:
    """Return the number of claims per verdict, as cells of a table."""
    return " | ".join(str(sum(each["verdict"] == verdict for each in entries)) for verdict in VERDICTS)


def _remark(claim: dict[str, str]) -> str:
    """Return the evidence of a claim without its links."""
    return re.sub(r"\[[^]]*\]\([^)]*\)(, \d{4}-\d\d-\d\d)?(, )?", "", claim["evidence"]).strip(" ;:,") or "–"


def rendered(text: str) -> str:
    """Return a page with its tables of results renewed."""
    make = {"summary": summary, "details": details, "leaderboard": leaderboard, "trained": trained}

    def table(place: re.Match[str]) -> str:
        what, _, page = place[2].partition(" ")
        made = make[what]() if what in make else claims_of(page) if page else claims_of_all()
        return place[1] + made + place[3]

    return PLACE.sub(table, text)


def main(arguments: list[str]) -> int:
    """Check the files that are named, or check all and render the pages or compare them."""
    names = [name for name in arguments if name != "--check"]
    stale = []
    try:
        for name in names:
            read(Path(name).resolve())
        for path in [] if names else sorted((ROOT / "docs").rglob("*.md")):
            text = path.read_text("utf-8")
            if (new := rendered(text)) != text:
                stale.append(path)
                if "--check" not in arguments:
                    path.write_text(new, "utf-8")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in stale:
        print(
            f"{path.relative_to(ROOT)} "
            + ("is out of date: run python tools/results.py" if "--check" in arguments else "is written")
        )
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
