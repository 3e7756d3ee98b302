"""Measure the package against the style guide.

    python tools/house.py                  # one table: metric, count, target
    python tools/house.py --list METRIC    # every place behind a count, as `path:line name`
    python tools/house.py --draw SEED      # ten random docstrings, messages and help texts to review

Files are parsed, never imported. The targets are for orientation: the exit status does not depend on them.
"""

import argparse
import ast
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("patchloom", "runtime/patchloom_runtime")
# Words that may not start or end a name. "without" and "planned" count only as whole names: `planned_epochs` is fine.
# "of" counts only at the start of a class name: `index_of` is fine.
BANNED = (
    "asked", "told", "shown", "found", "given", "said", "wishes", "beginning", "beginnings", "kept_looks", "pulse",
    "naming", "alike", "beside", "without", "planned", "altered", "thing", "of",
)  # fmt: skip
FINE_IN_COMPOUNDS = ("without", "planned")
BRITISH = re.compile(
    "artefact|(?:col|fav|flav|hon|lab|neighb|behavi)our|centre|fibre|metre|grey|catalogue|analys[ei]|licence|defence|judgement"
    "|(?:label|model|cancel|travel|channel)l(?:ed|ing)"
    "|(?:optim|normal|initial|serial|quant|regular|token|visual|summar|general|special|standard|organ|recogn|minim|maxim|local"
    "|random|synchron|vector|discret|binar|parallel|memor|util|final|categor|custom|penal|priorit|equal|factor|real|character"
    "|material|stabil|linear|raster|solar)is(?:e|ing|ation)"
)
MESSAGE_CALLS = {"print", "echo", "say", "note", "log", "warn", "warning"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Place(NamedTuple):
    path: str
    line: int
    name: str


class Source(NamedTuple):
    path: str
    lines: int
    tree: ast.Module
    nodes: list[ast.AST]  # of the whole tree


def read_sources(root: Path, folder: str, pattern: str = "*.py") -> list[Source]:
    sources = []
    for path in sorted((root / folder).rglob(pattern)):
        text = path.read_text("utf-8")
        tree = ast.parse(text, str(path))
        sources.append(Source(path.relative_to(root).as_posix(), len(text.splitlines()), tree, list(ast.walk(tree))))
    return sources


def find(sources: list[Source], kinds: type) -> Iterator[tuple[str, ast.AST]]:
    """Yield every node of some kinds with the path of its file."""
    return ((source.path, node) for source in sources for node in source.nodes if isinstance(node, kinds))


def last_name(node: ast.AST) -> str:
    """Return `c` for `a.b.c` and for `a.b.c(…)`."""
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", "") or getattr(node, "id", "")


# Names


def definitions(sources: list[Source]) -> Iterator[Place]:
    """Yield every name that is defined or bound, modules and attributes of `self` included."""
    for source in sources:
        path = Path(source.path)
        yield Place(source.path, 1, path.parent.name if path.stem == "__init__" else path.stem)
        for node in source.nodes:
            match node:
                case (
                    ast.ClassDef(name=str(name))
                    | ast.FunctionDef(name=str(name))
                    | ast.AsyncFunctionDef(name=str(name))
                    | ast.arg(arg=name)
                    | ast.Name(id=name, ctx=ast.Store())
                    | ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store())
                    | ast.ExceptHandler(name=str(name))
                    | ast.MatchAs(name=str(name))
                    | ast.MatchStar(name=str(name))
                    | ast.alias(asname=str(name))
                ):
                    yield Place(source.path, node.lineno, name)


def banned_words(name: str) -> list[str]:
    """Return the banned words that a name starts or ends with: `task_asked`, `_told`, `FoundRun`."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name.strip("_"))
    parts = f"_{snake.lower()}_"
    words = [
        word
        for word in BANNED[:-1]
        if parts == f"_{word}_"
        or (word not in FINE_IN_COMPOUNDS and (parts.startswith(f"_{word}_") or parts.endswith(f"_{word}_")))
    ]
    return [*words, "of"] if re.match("Of(_|$)", snake) else words


def banned_names(sources: list[Source]) -> list[Place]:
    return [place for place in definitions(sources) if banned_words(place.name)]


def british_names(sources: list[Source]) -> list[Place]:
    return [place for place in definitions(sources) if BRITISH.search(place.name.lower())]


def duplicate_classes(sources: list[Source]) -> list[Place]:
    places = defaultdict(list)
    for path, node in find(sources, ast.ClassDef):
        places[node.name].append(Place(path, node.lineno, node.name))
    return [place for _, same in sorted(places.items()) if len({each.path for each in same}) > 1 for place in same]


# Sizes


def long_functions(sources: list[Source]) -> list[Place]:
    sizes = ((path, node, node.end_lineno - node.lineno + 1) for path, node in find(sources, Function))
    return [Place(path, node.lineno, f"{node.name} ({size} lines)") for path, node, size in sizes if size > 60]


def many_parameters(sources: list[Source]) -> list[Place]:
    """List functions with more than 10 parameters. Triton kernels are left out, and `self` and `cls` do not count."""
    places = []
    for path, node in find(sources, Function):
        count = sum(
            isinstance(each, ast.arg) and each.arg not in ("self", "cls") for each in ast.iter_child_nodes(node.args)
        )
        if count > 10 and not any(last_name(each).endswith("jit") for each in node.decorator_list):
            places.append(Place(path, node.lineno, f"{node.name} ({count} parameters)"))
    return places


def crowded_folders(sources: list[Source]) -> list[Place]:
    counts = defaultdict(int)
    for source in sources:
        counts[Path(source.path).parent.as_posix()] += 1
    return [Place(folder, 1, f"{count} files") for folder, count in counts.items() if count > 15]


def small_modules(sources: list[Source]) -> list[Place]:
    small = (source for source in sources if source.lines <= 40 and Path(source.path).stem != "__init__")
    return [Place(source.path, 1, f"{Path(source.path).stem} ({source.lines} lines)") for source in small]


def inner_imports(sources: list[Source], doors: bool = False) -> list[Place]:
    """List imports inside functions: those of the doors (the command line, `patchloom/__init__.py`) or the others."""
    chosen = (s for s in sources if doors == s.path.startswith(("patchloom/__init__.py", "patchloom/cli/")))
    return [Place(s.path, node.lineno, ast.unparse(node)) for s in chosen for node in imports_below(s.tree)]


def own_inner_imports(sources: list[Source]) -> list[Place]:
    return [place for place in inner_imports(sources) if place.name.startswith("from patchloom")]


def package_imports(sources: list[Source]) -> list[Place]:
    """List imports of optional or slow packages (pyarrow, timm, torchvision …) inside functions."""
    return [place for place in inner_imports(sources) if not place.name.startswith("from patchloom")]


def imports_below(node: ast.AST, in_function: bool = False) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            if in_function:
                yield child
        elif isinstance(child, ast.If) and last_name(child.test) == "TYPE_CHECKING":
            yield from imports_below(ast.Module(child.orelse, []), in_function)
        else:
            yield from imports_below(child, in_function or isinstance(child, Function))


# Prose


def docstrings(sources: list[Source]) -> Iterator[tuple[Place, str]]:
    for path, node in find(sources, ast.Module | ast.ClassDef | Function):
        if text := ast.get_docstring(node):
            yield Place(path, getattr(node, "lineno", 1), getattr(node, "name", Path(path).stem)), text


def short_docstrings(sources: list[Source]) -> list[Place]:
    return [place for place, text in docstrings(sources) if len(text.split()) <= 4]


def text_of(node: ast.AST) -> str:
    """Return the text of a string expression, with the code of f-string fields in braces."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(text_of, values))
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return text_of(left) + text_of(right)
    return ""


def messages(sources: list[Source]) -> Iterator[tuple[Place, str]]:
    """Yield the texts, of two words or more, of raised errors, warnings and printed notes."""
    for path, node in find(sources, ast.Raise | ast.Call):
        call = node.exc if isinstance(node, ast.Raise) else node if last_name(node) in MESSAGE_CALLS else None
        for argument in call.args if isinstance(call, ast.Call) else ():
            if " " in (text := text_of(argument)).strip():
                yield Place(path, node.lineno, last_name(call)), text


def help_texts(sources: list[Source]) -> Iterator[tuple[Place, str]]:
    """Yield the values of `help=` and the first positional argument of `Option(…)` and `Argument(…)`."""
    for path, node in find(sources, ast.keyword | ast.Call):
        match node:
            case ast.keyword(arg="help", value=value):
                pass
            case ast.Call(args=[value, *_]) if last_name(node) in ("Option", "Argument"):
                pass
            case _:
                continue
        if text := text_of(value):
            yield Place(path, value.lineno, "help"), text


# Tests


def test_functions(sources: list[Source]) -> Iterator[tuple[Source, Function]]:
    for source in sources:
        classes = [node for node in source.tree.body if isinstance(node, ast.ClassDef)]
        for node in (node for scope in (source.tree, *classes) for node in scope.body):
            if isinstance(node, Function) and node.name.startswith("test"):
                yield source, node


def sentence_comparisons(sources: list[Source]) -> list[Place]:
    """List sentences that tests compare with: operands of comparisons, `match=`, and the values of `parametrize`."""
    places = []
    for source, test in test_functions(sources):
        assigned = [node for node in source.tree.body if isinstance(node, ast.Assign)]
        constants = {last_name(target): node.value for node in assigned for target in node.targets}
        strings = [string for node in ast.walk(test) for string in compared_strings(node, constants)]
        starts = {(string.lineno, string.col_offset) for string in strings if is_sentence(text_of(string))}
        places += [Place(source.path, line, test.name) for line, _ in sorted(starts)]
    return places


def compared_strings(node: ast.AST, constants: dict[str, ast.expr]) -> Iterator[ast.expr]:
    match node:
        case ast.Compare():
            for operand in (node.left, *node.comparators):
                yield from strings_in(operand, constants)
        case ast.keyword(arg="match"):
            yield from strings_in(node.value, constants, in_calls=True)
        case ast.Call() if last_name(node) == "parametrize":
            for value in (*node.args[1:], *(each.value for each in node.keywords if each.arg == "argvalues")):
                yield from strings_in(value, constants, in_calls=True)


def strings_in(node: ast.AST, constants: dict[str, ast.expr], in_calls: bool = False) -> Iterator[ast.expr]:
    """Yield the strings of a literal, following module constants and, if wanted, the arguments of calls."""
    literals = ast.List | ast.Tuple | ast.Set | ast.Dict | ast.BinOp | ast.IfExp | ast.Starred
    if isinstance(node, ast.Constant | ast.JoinedStr):
        yield node
    elif isinstance(node, ast.Name) and node.id in constants:
        others = {name: value for name, value in constants.items() if name != node.id}
        yield from strings_in(constants[node.id], others, in_calls)
    elif isinstance(node, literals) or (in_calls and getattr(node, "arg", "") not in ("id", "marks")):
        for child in ast.iter_child_nodes(node):
            yield from strings_in(child, constants, in_calls)


def is_sentence(text: str) -> bool:
    """Return whether a text has four words; f-string fields, numbers, absolute paths and options are not words."""
    return sum(bool(re.match(r"[\"'(`^]*[A-Za-z]", word)) for word in re.sub(r"\{[^}]*\}", "…", text).split()) >= 4


def unasserted_tests(sources: list[Source]) -> list[Place]:
    """List tests with neither an assert statement nor a call of `raises`, `warns`, `fail` or `assert_…`."""

    def checks(node: ast.AST) -> bool:
        called = last_name(node) if isinstance(node, ast.Call) else ""
        return isinstance(node, ast.Assert) or called in ("raises", "warns", "fail") or called.startswith("assert")

    tests = test_functions(sources)
    return [Place(s.path, test.lineno, test.name) for s, test in tests if not any(map(checks, ast.walk(test)))]


# The table


def files(sources: list[Source]) -> list[Place]:
    return [Place(source.path, source.lines, Path(source.path).stem) for source in sources]


def all_tests(sources: list[Source]) -> list[Place]:
    return [Place(source.path, test.lineno, test.name) for source, test in test_functions(sources)]


def distinct(places: list[Place]) -> int:
    return len({place.name for place in places})


def distinct_tests(places: list[Place]) -> int:
    return len({(place.path, place.name) for place in places})


class Metric(NamedTuple):
    """A row of the table; `count` turns the places into its number."""

    title: str
    target: str
    places: Callable[[list[Source]], list[Place]]
    count: Callable[[list[Place]], int] = len


METRICS = {
    "files": Metric("files", "≤ 330", files),
    "lines": Metric("lines", "≤ 50,000", files, lambda places: sum(place.line for place in places)),
    "duplicate-classes": Metric("class names in more than one file", "0", duplicate_classes, distinct),
    "banned-names": Metric("banned names, distinct", "0", banned_names, distinct),
    "banned-definitions": Metric("banned names, definitions", "0", banned_names),
    "british-names": Metric("names with British spelling, distinct", "0", british_names, distinct),
    "long-functions": Metric("functions over 60 lines", "0", long_functions),
    "many-parameters": Metric("functions with more than 10 parameters", "0", many_parameters),
    "crowded-folders": Metric("folders with more than 15 files", "0", crowded_folders),
    "small-modules": Metric("modules of 40 lines or fewer", "", small_modules),
    "inner-imports": Metric("imports of own modules inside functions", "< 60", own_inner_imports),
    "package-imports": Metric("imports of other packages inside functions", "", package_imports),
    "door-imports": Metric("imports inside functions of the doors", "", lambda s: inner_imports(s, doors=True)),
    "short-docstrings": Metric("docstrings of four words or fewer", "", short_docstrings),
}
TEST_METRICS = {
    "tests": Metric("test functions", "", all_tests),
    "sentence-tests": Metric("tests that compare a sentence", "< 60", sentence_comparisons, distinct_tests),
    "sentences": Metric("sentences that tests compare", "", sentence_comparisons),
    "unasserted-tests": Metric("tests without an assert of their own", "", unasserted_tests),
}


def print_table(package: list[Source], tests: list[Source]) -> None:
    rows = [("metric", "count", "target", "--list")]
    for key, metric in (METRICS | TEST_METRICS).items():
        places = metric.places(package if key in METRICS else tests)
        rows.append((metric.title, f"{metric.count(places):,}", metric.target, key))
        for word in BANNED if key == "banned-definitions" else ():
            same = [place for place in places if word in banned_words(place.name)]
            rows.append((f"  {word} (distinct / definitions)", f"{distinct(same)} / {len(same)}", "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for title, count, target, key in rows:
        print(f"{title:<{widths[0]}}  {count:>{widths[1]}}  {target:>{widths[2]}}  {key}".rstrip())
    names = sorted({place.name for place in duplicate_classes(package)})
    print(f"\nclass names in more than one file: {', '.join(names) or 'none'}")


def print_draw(package: list[Source], seed: int) -> None:
    for title, texts in (("docstrings", docstrings), ("messages", messages), ("help texts", help_texts)):
        everything = list(texts(package))
        print(f"{title} (10 of {len(everything):,})")
        for place, text in random.Random(seed).sample(everything, min(10, len(everything))):
            print(f"  {place.path}:{place.line} {place.name}\n      " + text.replace("\n", "\n      "))


def main(arguments: list[str] | None = None) -> None:
    keys = [*METRICS, *TEST_METRICS]
    parser = argparse.ArgumentParser(description="Measure the package against the style guide.")
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent, help="Repository to measure.")
    parser.add_argument("--list", metavar="METRIC", choices=keys, help=f"List every place: {', '.join(keys)}.")
    parser.add_argument("--draw", metavar="SEED", type=int, help="Draw random docstrings, messages and help texts.")
    options = parser.parse_args(arguments)
    package = [source for folder in PACKAGES for source in read_sources(options.root, folder)]
    tests = read_sources(options.root, "tests", "test_*.py")
    if options.list:
        metric = (METRICS | TEST_METRICS)[options.list]
        for place in metric.places(package if options.list in METRICS else tests):
            print(f"{place.path}:{place.line} {place.name}")
    elif options.draw is not None:
        print_draw(package, options.draw)
    else:
        print_table(package, tests)


if __name__ == "__main__":
    main()
