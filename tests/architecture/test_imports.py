"""The way through the code: imports go to the left alone, and importing patchloom costs nothing."""

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent.parent / "patchloom"

# Left to right; a stage imports itself and what stands before it.
ORDER = [
    "errors",
    "options",
    "plugins",
    "machine",
    "disk",
    "recipes",
    "data",
    "layers",
    "models",
    "objectives",
    "engine",
    "evaluation",
    "runs",
    "report",
    "inference",
    "exporters",
    "tasks",
    "training",
    "timm",
    "serving",
    "cli",
]


def stage_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path) -> set[str]:
    """Modules of patchloom that a file imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "patchloom":
            found.add(node.module if node.module != "patchloom" else f"patchloom.{node.names[0].name}")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "patchloom"}
    return found


def test_imports_go_to_the_left() -> None:
    wrong = []
    # The package's own names import every stage when they are first used.
    for path in sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "__init__.py"}):
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for module in imports_of(path) - {"patchloom.__version__"}:
            stage = stage_of(module)
            assert stage in ORDER, f"{path} imports {module}, a stage ORDER does not know"
            if ORDER.index(stage) > ORDER.index(own):
                wrong.append(f"{path.relative_to(PACKAGE)} imports {module}, which stands to its right")
    assert wrong == []


def test_the_runtime_imports_nothing_of_patchloom() -> None:
    runtime = PACKAGE.parent / "runtime" / "patchloom_runtime"
    files = sorted(runtime.rglob("*.py"))
    assert files
    wrong = {str(path.relative_to(runtime)): names for path in files if (names := imports_of(path))}
    named = [path.name for path in files if '"patchloom.' in path.read_text()]  # imported by importlib
    assert (wrong, named) == ({}, [])


def test_the_runtime_loads_quickly() -> None:
    code = "import sys, patchloom_runtime; print({'torch', 'numpy', 'PIL', 'patchloom'} & set(sys.modules))"
    assert run(code) == "set()\n"


def test_no_utils() -> None:
    names = [path.stem for path in PACKAGE.rglob("*.py")]
    assert not [name for name in names if name in ("utils", "util", "helpers", "misc", "common")]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_importing_is_silent_and_loads_no_torch() -> None:
    heavy = "{'torch', 'timm', 'torchvision', 'numpy', 'rich', 'typer', 'accelerate'}"
    assert run(f"import sys, patchloom; print({heavy} & set(sys.modules))") == "set()\n"


def test_the_help_loads_no_torch() -> None:
    code = "import sys, patchloom.cli; print({'torch', 'timm', 'torchvision', 'numpy'} & set(sys.modules))"
    assert run(code) == "set()\n"


def test_importing_and_creating_open_no_socket() -> None:
    run(
        "import socket\n"
        "def refuse(*a, **k): raise AssertionError('a socket was opened')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "import patchloom\n"
        "patchloom.create_model('resmlp_s12', depth=1, dim=16)\n"
        "patchloom.list_models()\n"
    )


def test_every_public_name_exists() -> None:
    import patchloom

    assert {name for name in patchloom.__all__ if getattr(patchloom, name) is None} == set()
    assert set(patchloom.__all__) <= set(dir(patchloom))
    with pytest.raises(AttributeError, match="nothing"):
        _ = patchloom.nothing


@pytest.mark.parametrize(("earlier", "name"), [("Artefact", "Artifact"), ("Recorded", "CapturedNetwork")])
def test_earlier_names_are_deprecated(earlier: str, name: str) -> None:
    import patchloom

    with pytest.warns(DeprecationWarning, match=name):
        assert getattr(patchloom, earlier) is getattr(patchloom, name)
    assert earlier not in patchloom.__all__


def test_no_file_imports_itself_by_a_detour() -> None:
    """Of every import, also inside functions; only for types (TYPE_CHECKING) files may know each other."""
    names = {
        ".".join(("patchloom", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for path in PACKAGE.rglob("*.py")
    }
    graph = {name: {found for found in imported_names(path) if found in names} for name, path in names.items()}
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> None:
        assert name not in way, " → ".join([*way[way.index(name) :], name])
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, [*way, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])


def imported_names(path: Path) -> set[str]:
    """Modules that a file imports when it runs, wherever the import stands."""
    found: set[str] = set()
    waiting: list[ast.AST] = [parsed(path)]
    while waiting:
        node = waiting.pop()
        for_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        waiting += node.orelse if for_types else ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "patchloom":
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_predicting_imports_few_modules_and_no_training(tmp_path: Path) -> None:
    golden = Path(__file__).parent.parent / "golden"
    line = ["patchloom", "predict", str(golden / "classifier"), str(golden / "pictures" / "0.png"), "--device", "cpu"]
    # Its recipe says which task a run of that time is; those of today say it themselves.
    run(f"import shutil; shutil.copytree({line[2]!r}, {str(tmp_path / 'run')!r})")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps(config | {"task": "classification"}))
    (tmp_path / "run" / "checksums.json").unlink()
    line[2] = str(tmp_path / "run")
    said = run(
        f"import sys; sys.argv = {line!r}\n"
        "from patchloom import cli\n"
        "try:\n    cli.main()\nexcept SystemExit as ended:\n    assert not ended.code\n"
        "print({'torch._dynamo', 'torch.distributed.tensor'} & set(sys.modules))\n"
        "print(*(name for name in sys.modules if name.startswith('patchloom')))"
    )
    assert said.splitlines()[-2] == "set()", "a second each, for what only compiled and sharded networks need"
    modules = said.splitlines()[-1].split()
    assert len(modules) <= 72, modules  # of which one row per task
    rooms = {name.split(".")[1] for name in modules if "." in name}
    assert not rooms & {"training", "objectives", "recipes", "report", "evaluation", "engine"}


def test_loading_a_run_knows_nothing_of_published_weights_and_data_sets() -> None:
    run_folder = Path(__file__).parent.parent / "golden" / "classifier"
    said = run(
        f"import sys, patchloom; patchloom.load({str(run_folder)!r}, device='cpu')\n"
        "print(*(name for name in sys.modules if name.startswith('patchloom')))"
    )
    unneeded = {
        *("models.pretrained.published", "models.pretrained.names", "models.pretrained.downloads"),
        "data.sources.torchvision_sets",
    }
    assert all((PACKAGE / f"{name.replace('.', '/')}.py").is_file() for name in unneeded)
    assert not {f"patchloom.{name}" for name in unneeded} & set(said.split())
