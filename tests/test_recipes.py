"""The files of the recipes, as far as they can be tried without a cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

import replicax as rx

RECIPES = Path(__file__).parents[1] / "examples" / "recipes"


def test_the_script_for_slurm_is_one():
    subprocess.run(["bash", "-n", RECIPES / "slurm.sh"], check=True)


@pytest.mark.parametrize("number", range(4))
def test_the_manifest_makes_a_cluster_of_its_pods(monkeypatch, number):
    manifest = yaml.safe_load((RECIPES / "jobset.yaml").read_text())
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    labels = {  # as JobSet sets them
        "jobset-name": manifest["metadata"]["name"],
        "replicatedjob-name": replicated["name"],
        "replicatedjob-replicas": str(replicated["replicas"]),
        "job-index": "0",
    }
    fields = {f"metadata.labels['jobset.sigs.k8s.io/{name}']": labels[name] for name in labels}
    (container,) = job["template"]["spec"]["containers"]
    for variable in container["env"]:
        if "value" in variable:
            value = variable["value"]
        else:
            value = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        monkeypatch.setenv(variable["name"], value)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", str(number))  # as Kubernetes does
    resolver = rx.cluster_resolver.KubernetesClusterResolver()
    assert job["completions"] == job["parallelism"] == 4
    addresses = [f"train-workers-0-{pod}.train:8470" for pod in range(4)]
    assert resolver.cluster_spec().as_dict() == {"worker": addresses}
    assert (resolver.task_type, resolver.task_id) == ("worker", number)
