"""The manifests of docs/manifests are what their own tools accept, and say what jdp reads."""

import importlib.util
import os
import shutil
import subprocess

import pytest
from cluster import ROOT

from jdp.launch import PEER_LOST, STOPPED, STUCK
from jdp.launched import Launched

MANIFESTS = ROOT / "docs" / "manifests"
SBATCH = MANIFESTS / "train.sbatch"


@pytest.fixture
def jobset():
    yaml = pytest.importorskip("yaml", reason="no PyYAML: pip install pyyaml")
    return yaml.safe_load((MANIFESTS / "jobset.yaml").read_text())


@pytest.mark.skipif(
    importlib.util.find_spec("kubeflow_trainer_api") is None,
    reason="no models of Kubernetes' objects: pip install kubeflow-trainer-api",
)
def test_the_jobset_is_one_that_kubernetes_knows(jobset):
    """Its fields down to the containers, and their types: what the models do not know they drop."""
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    def kept():
        return JobsetV1alpha2JobSet.from_dict(jobset).to_dict()

    assert kept() == jobset
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["backofLimit"] = 0
    assert kept() != jobset
    job["completionMode"] = "Index"
    with pytest.raises(ValueError, match="completionMode"):
        kept()


def test_the_pods_are_told_who_they_are(jobset, monkeypatch):
    (one,) = jobset["spec"]["replicatedJobs"]
    job = one["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    for given in container["env"]:
        monkeypatch.setenv(given["name"], given.get("value", "2"))  # of the pod with index 2
    assert Launched.is_env_present()
    assert Launched.get_process_count() == job["completions"] == job["parallelism"]
    assert Launched.get_process_id() == 2
    host, port = Launched.get_coordinator_address(None, None).split(":")
    name = jobset["metadata"]["name"]
    assert (one["replicas"], job["completionMode"]) == (1, "Indexed")
    assert host == f"{name}-{one['name']}-0-0.{name}"  # job 0, pod 0, of the JobSet's own network
    assert int(port) > 1023


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [
        (0, 0, False),
        (1, 0, False),
        (STUCK, 0, False),
        (PEER_LOST, 0, True),
        (STOPPED, 3, True),
        (128 + 9, 19, True),
        (STOPPED, 20, False),
    ],
)
def test_the_batch_script_queues_what_should_start_again(tmp_path, code, restarts, again):
    for name, text in (("srun", f"exit {code}"), ("scontrol", f'echo "$*" > {tmp_path}/asked')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    env |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    done = subprocess.run(["bash", "-u", SBATCH], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == "requeue 7\n" * again


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="no shellcheck: apt install shellcheck")
def test_the_batch_script_has_no_trap():
    done = subprocess.run(["shellcheck", SBATCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
