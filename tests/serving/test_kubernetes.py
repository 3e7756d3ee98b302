"""deploy/kubernetes.yaml fits the server: its options, port, probes, and the time it takes to end."""

from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from patchloom.cli.serve import serve
from patchloom.cli.verb import verb
from patchloom.serving.app import PROBES, App
from patchloom.serving.processes import STOP_SECONDS
from patchloom.serving.server import LAST_SECONDS
from tests.serving.clients import get

FILE = Path(__file__).parent.parent.parent / "deploy" / "kubernetes.yaml"


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(FILE.read_text())}


def options(container: dict[str, Any]) -> dict[str, Any]:
    """The command line of the container as `patchloom serve` understands it."""
    params: dict[str, Any] = {}
    app = typer.Typer()
    app.command()(verb(serve))
    command: Any = typer.main.get_command(app)
    assert (container["command"], container["args"][0]) == (["patchloom"], "serve")
    with command.make_context("serve", list(container["args"][1:])) as context:
        params |= context.params
    return params


def test_ports_probes_and_the_end(documents: dict[str, Any], app: App) -> None:
    pod = documents["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    params = options(container)
    assert params["host"] == "0.0.0.0"
    assert params["source"].startswith(container["volumeMounts"][0]["mountPath"])
    assert container["ports"] == [{"name": "http", "containerPort": params["port"]}]
    for probe, path in (("startupProbe", "/ready"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")):
        assert container[probe]["httpGet"] == {"path": path, "port": "http"}
        assert path in PROBES  # a probe has no key
        assert get(app, path).status == 200
    waited = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= waited + params["deadline"] + LAST_SECONDS + STOP_SECONDS
    assert container["env"][0]["name"] == "PATCHLOOM_API_KEY"
    assert int(container["resources"]["limits"]["cpu"]) % params["processes"] == 0
    assert pod["securityContext"]["runAsNonRoot"]


def test_the_service_finds_the_pods(documents: dict[str, Any]) -> None:
    labels = documents["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert documents["Service"]["spec"]["selector"] == labels
    assert documents["Service"]["spec"]["ports"][0]["targetPort"] == "http"
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert documents[kind]["spec"]["selector"]["matchLabels"] == labels


def test_kubernetes_takes_it(documents: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for document in documents.values():
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
