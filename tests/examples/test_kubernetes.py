"""The Kubernetes manifest: its fields, and that its command is valid on the ranks that it starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megazero.config.parse import parse_run
from tests.examples.test_recipes import EXAMPLES, ranks, start, taken_apart

MANIFEST = EXAMPLES / "kubernetes.yaml"
FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"network", "failurePolicy", "successPolicy", "startupPolicy", "replicatedJobs", "ttlSecondsAfterFinished"},
    "spec.network": {"enableDNSHostnames", "publishNotReadyAddresses", "subdomain"},
    "spec.failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "spec.failurePolicy.rules": {"name", "action", "onJobFailureReasons", "targetReplicatedJobs"},
    "spec.replicatedJobs": {"name", "replicas", "template", "dependsOn", "groupName"},
    "job.spec": {"completionMode", "parallelism", "completions", "backoffLimit", "podFailurePolicy", "template"},
    "pod.spec": {"restartPolicy", "terminationGracePeriodSeconds", "securityContext", "containers", "volumes"},
    "container": {*("name", "image", "workingDir", "command", "args", "env", "ports", "resources", "volumeMounts")},
}
"""What the two APIs know (jobset.x-k8s.io/v1alpha2, batch/v1) of what a manifest for training may need; another word
is a mistake in spelling, which kubectl would only find in a cluster."""
DOWNWARD = {"metadata.labels['batch.kubernetes.io/controller-uid']": "3f0c8e0a", "metadata.name": "megazero-node-0-1"}
"""Fields that a pod may ask for, and what one gets."""


def part(at: dict[str, Any], *path: str | int) -> Any:
    found: Any = at
    for key in path:
        found = found[key]
    return found


@pytest.fixture(scope="module")
def jobset() -> dict[str, Any]:
    (document,) = yaml.safe_load_all(MANIFEST.read_text())
    return document


@pytest.fixture(scope="module")
def job(jobset: dict[str, Any]) -> dict[str, Any]:
    (found,) = part(jobset, "spec", "replicatedJobs")
    return part(found, "template", "spec")


@pytest.fixture(scope="module")
def pod(job: dict[str, Any]) -> dict[str, Any]:
    return part(job, "template", "spec")


@pytest.fixture(scope="module")
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["containers"]
    return found


def environment(container: dict[str, Any]) -> dict[str, str]:
    """What the container's process finds, with $(NAME) put in as Kubernetes does: of names that stand above only."""
    values: dict[str, str] = {}
    for entry in container["env"]:
        value = entry["value"] if "value" in entry else DOWNWARD[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        assert isinstance(value, str), f"{entry['name']}: Kubernetes takes strings"
        values[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], value)
    return values


def test_every_field_is_one_of_the_api(
    jobset: dict[str, Any], job: dict[str, Any], pod: dict[str, Any], container: dict[str, Any]
) -> None:
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    places = {
        "": [jobset],
        "spec": [jobset["spec"]],
        "spec.network": [jobset["spec"]["network"]],
        "spec.failurePolicy": [jobset["spec"]["failurePolicy"]],
        "spec.failurePolicy.rules": jobset["spec"]["failurePolicy"]["rules"],
        "spec.replicatedJobs": jobset["spec"]["replicatedJobs"],
        "job.spec": [job],
        "pod.spec": [pod],
        "container": [container],
    }
    unknown = {where: set(at) - FIELDS[where] for where, found in places.items() for at in found}
    assert not any(unknown.values()), unknown


def test_its_command_is_valid_on_its_ranks(job: dict[str, Any], container: dict[str, Any], tmp_path: Path) -> None:
    """The recipe's script runs in the manifest's environment; what it hands to torchrun is read as the ranks do."""
    shell, script, *more = container["command"]
    inside = EXAMPLES.parent / Path(script).relative_to("/megazero")
    assert shell == "bash" and inside.is_file()
    given = environment(container)
    options, words = taken_apart(start(tmp_path, inside, *more, *container["args"], **given))
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert ranks(options) == job["parallelism"] * gpus == 16 and job["completions"] == job["parallelism"]
    run = parse_run(words, ranks(options))
    assert run == parse_run([*words, "--validate-only", "--world-size", "16"], None)
    assert run.checkpoint.save == run.checkpoint.load == given["SAVE"] and run.data.data_path == (given["DATA_PATH"],)
    assert options["--rdzv-endpoint"] == given["RDZV_ENDPOINT"] and options["--rdzv-id"] == given["RDZV_ID"]
    assert options["--log-dir"].endswith(DOWNWARD["metadata.name"]), "one folder of logs for each node"
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert container["workingDir"] in mounts and given["SAVE"].startswith("/runs/") and "/runs" in mounts
    assert "readOnly" not in mounts["/runs"] and mounts["/data"]["readOnly"]


def test_the_nodes_meet_at_the_first_pod(jobset: dict[str, Any], container: dict[str, Any]) -> None:
    host, port = environment(container)["RDZV_ENDPOINT"].split(":")
    name, first = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["name"]
    assert host == f"{name}-{first}-0-0.{jobset['spec']['network'].get('subdomain', name)}"
    assert {"containerPort": int(port)} in container["ports"]
    assert jobset["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}


def test_a_save_has_the_time_that_it_may_take(pod: dict[str, Any]) -> None:
    launch = (EXAMPLES / "launch.sh").read_text()
    (seconds,) = re.findall(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-(\d+)\}", launch)
    assert pod["terminationGracePeriodSeconds"] >= int(seconds) + 60


def test_a_failure_starts_again_and_a_wrong_configuration_does_not(
    jobset: dict[str, Any], job: dict[str, Any], pod: dict[str, Any], container: dict[str, Any]
) -> None:
    (rule,) = job["podFailurePolicy"]["rules"]
    codes = {"containerName": container["name"], "operator": "In", "values": [2]}
    assert rule == {"action": "FailJob", "onExitCodes": codes}
    assert pod["restartPolicy"] == "Never", "a pod failure policy asks for it"
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] > 0 and policy["rules"][0]["action"] == "FailJobSet"
    assert policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"] and job["backoffLimit"] == 0


def test_volumes_are_mounted_and_memory_is_shared(pod: dict[str, Any], container: dict[str, Any]) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(volumes) == set(mounts)
    assert volumes["shared-memory"]["emptyDir"]["medium"] == "Memory" and mounts["shared-memory"] == "/dev/shm"
    assert pod["securityContext"]["runAsNonRoot"] is True
    user = re.search(r"^USER (\d+)$", (EXAMPLES.parent / "Dockerfile").read_text(), re.M)
    assert user and pod["securityContext"]["runAsUser"] == int(user[1])
