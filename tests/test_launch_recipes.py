"""The launch recipes, as files: each is run as its platform would, with stand-ins for torchrun and srun."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from torch.distributed.run import parse_args

from mics.doctor.command import DoctorConfig
from mics.train.settings_file import parse_train_config
from mics.utils.command_line import parse

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "examples" / "launch"
SHELL: Final = ("torchrun.sh", "slurm.sbatch", "aws.sbatch")
NODES: Final = 4
_STAND_INS: Final = {
    "torchrun": f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n",
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": "#!/bin/bash\nprintf 'head\\nother\\n'\n",
}
_SLURM: Final = {
    "SLURM_JOB_ID": "7",
    "SLURM_NNODES": str(NODES),
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_ON_NODE": "64",
    "SLURM_JOB_NODELIST": "head,other",
}
_PLATFORMS: Final[dict[str, dict[str, str]]] = {
    "torchrun.sh": {"HEAD": "head", "NODES": str(NODES), "RANKS": "8"},
    "slurm.sbatch": _SLURM,
    "aws.sbatch": _SLURM,
    "kubernetes.yaml": {
        "PET_NNODES": str(NODES),
        "PET_NPROC_PER_NODE": "8",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "head",
        "PET_MASTER_PORT": "29500",
    },
    "skypilot.yaml": {
        "SKYPILOT_NODE_IPS": "head\nother",
        "SKYPILOT_NUM_NODES": str(NODES),
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_TASK_ID": "sky-7",
    },
}


def _documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def _command(name: str) -> list[str]:
    """What the platform executes on a node."""
    if name in SHELL:
        return ["bash", str(FOLDER / name)]
    if name == "kubernetes.yaml":
        trainer = _documents(name)[1]["spec"]["trainer"]
        return [*trainer["command"], *trainer["args"]]
    return ["bash", "-c", _documents(name)[0]["run"]]


@pytest.fixture
def calls_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Namespace]]:
    """The calls of torchrun that a recipe makes, as torchrun reads them."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(FOLDER / "run.yaml", tmp_path)
    for name, text in _STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(name: str, **more: str) -> list[Namespace]:
        path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
        environment = {**_PLATFORMS[name], **more}
        done = subprocess.run(
            _command(name), env={"PATH": path, **environment}, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        with monkeypatch.context() as patch:
            for variable, value in environment.items():
                patch.setenv(variable, value)  # torchrun reads PET_ variables
            return [parse_args(json.loads(line)) for line in done.stdout.splitlines()]

    return run


@pytest.mark.parametrize("name", _PLATFORMS)
def test_a_recipe_checks_the_cluster_and_then_trains(
    name: str, calls_of: Callable[..., list[Namespace]]
) -> None:
    """Both under the same torchrun, with the same settings file; restarts and a checkpoint for training."""
    doctor, train = calls_of(name)
    for call in (doctor, train):
        assert (call.nnodes, call.nproc_per_node) == (str(NODES), "8")
        assert (call.rdzv_backend, call.rdzv_endpoint) == ("c10d", "head:29500")
        assert "join_timeout=300" in call.rdzv_conf.split(",")
        assert (call.module, call.training_script) == (True, "mics.cli")
    assert doctor.rdzv_id != train.rdzv_id
    assert (doctor.max_restarts, train.max_restarts) == (3, 3)
    assert doctor.training_script_args == ["doctor", "--config", "run.yaml"]
    parse(DoctorConfig, doctor.training_script_args[1:], prog="mics doctor").check()
    command, *args = train.training_script_args
    assert command == "train"
    config = parse_train_config(args)
    assert config.checkpoint.resume == "latest" and config.checkpoint.interval > 0


def test_a_job_that_slurm_starts_again_trains_at_once(calls_of: Callable[..., list[Namespace]]) -> None:
    """The cluster was checked at the first start."""
    for name in ("slurm.sbatch", "aws.sbatch"):
        (train,) = calls_of(name, SLURM_RESTART_COUNT="1")
        assert train.training_script_args[0] == "train"
    for name in SHELL:
        assert len(calls_of(name, DOCTOR="no")) == 1


@pytest.mark.parametrize("name", ["kubernetes.yaml", "skypilot.yaml"])
def test_one_node_hosts_the_rendezvous(name: str, calls_of: Callable[..., list[Namespace]]) -> None:
    """Said by the node's number: looking up one's own name may fail in a container."""
    variable = "PET_NODE_RANK" if name == "kubernetes.yaml" else "SKYPILOT_NODE_RANK"
    for number, expected in (("0", "is_host=1"), ("3", "is_host=0")):
        assert expected in calls_of(name, **{variable: number})[1].rdzv_conf.split(",")


@pytest.mark.parametrize("name", SHELL)
def test_scripts_are_clean(name: str) -> None:
    """bash reads them, and so does shellcheck where there is one."""
    subprocess.run(["bash", "-n", FOLDER / name], check=True)
    if shutil.which("shellcheck") is not None:
        subprocess.run(["shellcheck", FOLDER / name], check=True)


def test_slurm_requeues_a_job_that_lost_a_node() -> None:
    """One task per node, the output of all attempts, and a signal before the time is up."""
    for name in ("slurm.sbatch", "aws.sbatch"):
        lines = (FOLDER / name).read_text().splitlines()
        options = {line.split()[1] for line in lines if line.startswith("#SBATCH")}
        assert {"--requeue", "--ntasks-per-node=1", "--open-mode=append", f"--nodes={NODES}"} <= options
        assert any(option.startswith("--signal=B:USR1@") for option in options)
    aws = (FOLDER / "aws.sbatch").read_text()
    assert "\nexport FI_EFA_USE_HUGE_PAGE=0" in aws and "\nexport NCCL_SOCKET_IFNAME=^docker" in aws
    assert "\nexport FI_PROVIDER" not in aws, "libfabric chooses EFA for itself since 1.18"


def test_kubernetes_has_what_the_trainer_asks_for() -> None:
    """A runtime with a job named node whose container is named node, and a job that refers to it."""
    runtime, job = _documents("kubernetes.yaml")
    assert runtime["apiVersion"] == job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert (runtime["kind"], job["kind"]) == ("ClusterTrainingRuntime", "TrainJob")
    assert runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] == "torch"
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    label = "trainer.kubeflow.org/trainjob-ancestor-step"
    assert replicated["template"]["metadata"]["labels"][label] == "trainer"
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "node"
    assert {mount["name"] for mount in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    assert runtime["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"] == 3
    assert runtime["spec"]["mlPolicy"]["torch"]["numProcPerNode"] == job["spec"]["trainer"]["numProcPerNode"]


def test_skypilot_has_what_a_task_asks_for() -> None:
    """Nodes, accelerators of each, and a recovery from errors beside that from lost nodes."""
    (task,) = _documents("skypilot.yaml")
    assert set(task) == {"name", "num_nodes", "workdir", "resources", "volumes", "setup", "run"}
    assert task["num_nodes"] == NODES and task["resources"]["accelerators"] == "A100:8"
    assert task["resources"]["job_recovery"]["max_restarts_on_errors"] == 3


def test_every_recipe_is_shown_in_full() -> None:
    """The page includes the files themselves, so that it cannot differ from them."""
    page = (ROOT / "docs" / "launching.md").read_text()
    for name in (*_PLATFORMS, "run.yaml"):
        assert f'--8<-- "examples/launch/{name}"' in page
    files = {file.name for file in FOLDER.iterdir()}
    assert files == {*_PLATFORMS, "run.yaml", "README.md"}
