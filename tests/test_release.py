"""What a release consists of: metadata, wheels and sdists, known vulnerabilities, workflows, images, citation."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import patchloom
import patchloom_runtime
from tools import release

ROOT = Path(__file__).parent.parent
PROJECTS = {
    name: tomllib.loads((path / "pyproject.toml").read_text())["project"] for name, path in release.PACKAGES.items()
}
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DOCKERFILES = sorted((ROOT / "deploy").glob("Dockerfile.*"))


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in (f"{text}.0.0").split(".")[:3])


def floors() -> dict[str, str]:
    """Package → the lowest version that the packages or one of their extras accept."""
    lowest = {}
    for project in PROJECTS.values():
        groups = [project["dependencies"], *project["optional-dependencies"].values()]
        for requirement in [each for group in groups for each in group]:
            if match := re.fullmatch(r"([\w.-]+)>=([\d.]+)", requirement):
                lowest[normalized(match[1])] = match[2]
    return lowest


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if "==" in line and not line.startswith("#")]
    return {normalized(line.split("==")[0]): line.split("==")[1] for line in lines}


# Metadata ------------------------------------------------------------------------------------------------------------


def test_both_packages_citation_and_image_have_one_version() -> None:
    assert patchloom.__version__ == patchloom_runtime.__version__ == release.version()
    assert f"patchloom-runtime=={patchloom.__version__}" in PROJECTS["patchloom"]["dependencies"]
    assert all("version" in project["dynamic"] for project in PROJECTS.values())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == patchloom.__version__
    dated = re.search(r"(?m)^## ([\d.]+) – ([\d-]+)$", (ROOT / "CHANGELOG.md").read_text())
    assert dated.groups() == (patchloom.__version__, str(citation["date-released"]))
    assert f"patchloom:{patchloom.__version__}\n" in (ROOT / "deploy" / "kubernetes.yaml").read_text()


@pytest.mark.parametrize("name", PROJECTS)
def test_the_metadata_says_what_an_index_shows(name: str) -> None:
    project = PROJECTS[name]
    assert project["authors"]
    assert len(project["keywords"]) == len(set(project["keywords"])) > 3
    assert "Typing :: Typed" in project["classifiers"]
    assert project["license"] == "Apache-2.0"
    assert not any(each.startswith("License ::") for each in project["classifiers"])  # superseded by `license`
    lowest = min(version(each.rsplit(" :: ")[-1]) for each in project["classifiers"] if re.search(r":: 3\.\d+$", each))
    assert version(project["requires-python"].removeprefix(">=")) == lowest
    folder = release.PACKAGES[name]
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (folder / name / "py.typed").read_bytes() == b""


def test_every_extra_is_tried_before_a_release() -> None:
    assert set(release.EXTRAS) == set(PROJECTS["patchloom"]["optional-dependencies"]) - {"dev", "fuzz"}
    commands, program = release.readme_commands()
    assert [command.split()[0] for command in commands] == ["train", "predict"]
    assert "import patchloom" in program


# Wheels and sdists ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling is not installed: `make dist` has it")
    folder = tmp_path_factory.mktemp("dist")
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    for path in release.PACKAGES.values():
        command = [sys.executable, "-m", "hatchling", "build", "-d", folder]
        subprocess.run(command, cwd=path, env=environment, check=True, capture_output=True)
    return folder


def tracked(folder: Path) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "."], cwd=folder, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a checkout of git")
    return set(listed.stdout.splitlines())


@pytest.mark.parametrize("name", PROJECTS)
def test_a_wheel_has_the_files_of_the_package_and_no_others(name: str, dist: Path) -> None:
    (path,) = dist.glob(f"{name}-*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        assert {each.date_time[0] for each in wheel.infolist()} == {2023}  # the date of SOURCE_DATE_EPOCH
        (info,) = {each.split("/")[0] for each in names if ".dist-info/" in each}
        metadata = wheel.read(f"{info}/METADATA").decode()
        entry_points = wheel.read(f"{info}/entry_points.txt").decode() if name == "patchloom" else ""
    assert info == f"{name}-{patchloom.__version__}.dist-info"
    own = {each for each in tracked(release.PACKAGES[name]) if each.startswith(f"{name}/")}
    assert {each for each in names if not each.startswith(info)} == own
    assert f"{name}/py.typed" in names
    assert f"\nVersion: {patchloom.__version__}\n" in metadata
    assert entry_points in ("", "[console_scripts]\npatchloom = patchloom.cli:main\n")


@pytest.mark.parametrize("name", PROJECTS)
def test_an_sdist_has_what_builds_the_wheel(name: str, dist: Path) -> None:
    (path,) = dist.glob(f"{name}-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
        assert {member.mtime for member in archive.getmembers() if member.isfile()} == {1_700_000_000}
    own = {each for each in tracked(release.PACKAGES[name]) if each.startswith(f"{name}/")}
    beside = names - own
    assert own <= names
    assert beside - {".gitignore", "CHANGELOG.md"} == {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}


# Known vulnerabilities -----------------------------------------------------------------------------------------------


def test_no_accepted_version_has_a_known_vulnerability() -> None:
    lowest, newest, oldest = floors(), pins("constraints.txt"), pins("constraints-oldest.txt")
    for advisory in json.loads((ROOT / "tools" / "advisories.json").read_text()):
        package, fixed = advisory["package"], version(advisory["fixed"])
        assert all(re.fullmatch(r"(CVE|PYSEC)-\d{4}-\d+|GHSA(-\w{4}){3}", each) for each in advisory["ids"]), advisory
        assert version(lowest[package]) >= fixed, advisory
        for pinned in (newest, oldest):
            assert package not in pinned or version(pinned[package]) >= fixed, advisory


def test_the_newest_versions_are_pinned() -> None:
    newest = pins("constraints.txt")
    untested = {"av", "pillow-heif", "openvino", "wandb", "mlflow", "trackio", "ray"}
    for package, floor in floors().items():
        if package not in untested:
            assert version(newest[package].split("+")[0]) >= version(floor), package


# Workflows, images, citation -----------------------------------------------------------------------------------------


def steps_of(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_pinned_and_asks_for_little(path: Path) -> None:
    text = path.read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert job["permissions"] in ({"contents": "read"}, {"id-token": "write"})
        assert job["timeout-minutes"] <= 60
    for step in steps_of(workflow):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step.get("uses", f"a/b@{'0' * 40}"))
        if "checkout@" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False
    assert all(re.search(r"# v\d", line) for line in text.splitlines() if " uses:" in line)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_targets_and_files_that_exist(path: Path) -> None:
    targets = set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text()))
    runs = [step["run"] for step in steps_of(yaml.safe_load(path.read_text())) if "run" in step]
    made = {word for run in runs if run.startswith("make ") for word in run.split()[1:]}
    assert made
    assert made <= targets
    if path.name == "ci.yml":
        images = yaml.safe_load(path.read_text())["jobs"]["images"]["strategy"]["matrix"]["image"]
        assert sorted(f"Dockerfile.{image}" for image in images) == [each.name for each in DOCKERFILES]
    else:
        for named in yaml.safe_load(path.read_text())[True]["pull_request"]["paths"]:  # YAML 1.1 reads `on` as true
            assert (ROOT / named).exists(), named


def test_the_tests_run_on_the_python_versions_of_the_classifiers() -> None:
    matrix = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["tests"]["strategy"][
        "matrix"
    ]
    for project in PROJECTS.values():
        listed = {match[1] for each in project["classifiers"] if (match := re.search(r":: (3\.\d+)$", each))}
        assert listed <= set(matrix["python"])


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_copies_what_exists_and_drops_its_rights(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"(?m)^FROM python:3\.\d+-slim-\w+$", text)
    assert re.findall(r"(?m)^(USER|ENTRYPOINT) (.*)$", text) == [("USER", "10001"), ("ENTRYPOINT", '["patchloom"]')]
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert {"constraints.txt", "pyproject.toml", "README.md", "LICENSE", "patchloom", "runtime"} == set(kept)
    assert all((ROOT / name).exists() for name in kept)
    extras = set(re.findall(r"'\.\[(.*)\]'", text)[0].split(",")) if "'.[" in text else set()
    assert extras <= set(PROJECTS["patchloom"]["optional-dependencies"])
    assert f"deploy/{path.name}" in text  # the command that builds it


def test_the_server_without_torch_has_the_other_requirements() -> None:
    """Everything that patchloom and its extra `serve` require, except what only runs need."""
    text = release.SERVER_FILE.read_text()
    named = {normalized(each.split("[")[0]) for each in re.search(r'PACKAGES="(.+)"', text)[1].split()}
    project = PROJECTS["patchloom"]
    required = {
        re.split(r"[>=\[]", each)[0] for each in project["dependencies"] + project["optional-dependencies"]["serve"]
    }
    required = {normalized(each) for each in required}
    assert required - named == {"torch", "torchvision", "timm", "huggingface-hub", "filelock", "pillow", "numpy"}
    assert named <= required


def test_the_citation_names_the_five_documents() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert len(citation["references"]) == 5
    assert all(reference["title"] and reference["authors"] for reference in citation["references"])
    linked = set(PROJECTS["patchloom"]["urls"].values())
    assert {reference["url"] for reference in citation["references"] if "url" in reference} == linked


def test_issue_forms_and_hooks_are_yaml() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        assert "body" not in form or {"name", "description"} <= set(form), path
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    ruff = f"ruff=={pins('constraints.txt')['ruff']}"
    assert {each for hook in hooks for each in hook["additional_dependencies"]} == {ruff}
