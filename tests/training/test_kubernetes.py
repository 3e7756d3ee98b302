"""deploy/kubernetes-train.yaml starts one process per GPU that find each other, and gives them time to save."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from patchloom.engine.rendezvous import DEFAULT_PORT

FILE = Path(__file__).parent.parent.parent / "deploy" / "kubernetes-train.yaml"


@pytest.fixture
def jobs() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text())


def test_processes_find_each_other_and_have_a_gpu_each(jobs: dict[str, Any]) -> None:
    assert (jobs["apiVersion"], jobs["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = jobs["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    options = dict(arg.removeprefix("--").split("=", 1) for arg in container["args"] if arg.startswith("--"))
    assert container["command"] == ["torchrun"]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == int(options["nnodes"])
    assert options["nproc-per-node"] == container["resources"]["limits"]["nvidia.com/gpu"]
    assert options["node-rank"] == "$(JOB_COMPLETION_INDEX)" == f"$({container['env'][0]['name']})"
    # The first pod is named SET-JOB-0-0 and found under the subdomain.
    host = f"{jobs['metadata']['name']}-{replicated['name']}-0-0.{jobs['spec']['network']['subdomain']}"
    assert jobs["spec"]["network"]["enableDNSHostnames"]
    assert options["master-addr"] == host
    assert int(options["master-port"]) == container["ports"][0]["containerPort"] == DEFAULT_PORT
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert mounts["/data"]["readOnly"]
    assert options["out"].startswith("/runs/")
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in mounts.values()}
    # One pod that fails ends all, and the set starts again.
    assert job["backoffLimit"] == 0
    assert jobs["spec"]["failurePolicy"]["maxRestarts"] > 0
    assert pod["terminationGracePeriodSeconds"] >= 60


def test_the_job_fits_the_schema_of_kubernetes(jobs: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    template = jobs["spec"]["replicatedJobs"][0]["template"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, **template}
    validate.validate(job, validate.latest_version(), strict=True)
