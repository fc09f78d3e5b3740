"""The guide's commands: a model on two hosts of two ranks under Slurm, and with `--long` another.

They are those of the page, but for fewer tokens and a shorter measurement; and only with `--long` a doctor
looks at the hosts first, as in `doctor/test_on_hosts.py`. Each model loses a node. `transformers` load the
results.
"""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Final

import pytest
from benchmarks.cluster.network import NamespaceCluster
from benchmarks.cluster.slurm import SlurmCluster

from tests import tiers
from tests.doc_blocks import ROOT, blocks_of
from tests.ranks import run_ranks
from tests.train.host_runs import ENVIRONMENT, cluster_name, losses, reference_losses, slurm

__all__ = ["cluster_name", "slurm"]  # fixtures

_PAGE: Final = "docs/from-a-plan-to-a-cluster.md"
_RUNS: Final = {"run.yaml": "llama-tiny", "roberta.yaml": "roberta-tiny"}
_SHORTER: Final = {"--tokens 200k": "--tokens 120k", "--max-seconds 20": "--max-seconds 3"}


def _commands() -> list[str]:
    """What the page tells to type, one by one."""
    code = "".join(block.code for block in blocks_of(_PAGE) if block.language == "bash")
    for old, new in _SHORTER.items():
        assert old in code
        code = code.replace(old, new)
    return re.sub(r"\s*\\\n\s*", " ", code).splitlines()


@pytest.mark.full
@pytest.mark.usefixtures("slurm")
@pytest.mark.timeout(1800)  # under a load that is not ours; three minutes without
def test_the_page(cluster_name: str, tmp_path: Path) -> None:
    """Every command succeeds. Each run loses a node, and ends with the losses of one that did not."""
    commands = [command for command in _commands() if tiers.long or "roberta" not in command]
    (tmp_path / "text").mkdir()
    shutil.copy(ROOT / "src/mics/train/fables.txt", tmp_path / "text")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "slurm").mkdir()
    runs = tmp_path / "runs"
    environment = {**ENVIRONMENT, "DOCTOR": "yes" if tiers.long else "no"}
    with (
        NamespaceCluster(3, "1gbit", name=cluster_name) as cluster,
        SlurmCluster(cluster, tmp_path / "slurm", gpus=2) as slurm,
    ):
        for command in commands:
            running = slurm.start("bash", "-c", command, cwd=tmp_path, env=environment)
            name = _RUNS.get(command.partition("slurm.sbatch ")[2])
            if name is not None:
                _lose_a_node(slurm, runs / name)
            output = running.communicate(timeout=600)[0]
            assert running.returncode == 0, f"{command}\n{output}\n{_printed(tmp_path)}"
    names = [folder.name for folder in sorted(runs.iterdir())]
    assert names == (["llama-tiny", "roberta-tiny"] if tiers.long else ["llama-tiny"])
    for config, name in list(_RUNS.items())[: len(names)]:
        assert f"going on from runs/{name}/checkpoints/step-" in _printed(tmp_path)
        uninterrupted = reference_losses(tmp_path, num_ranks=4, ranks_per_node=2, name=name, config=config)
        assert losses(runs / name) == uninterrupted
    run_ranks(1, _check_exports, str(runs), names, launch="none")


def _lose_a_node(slurm: SlurmCluster, run_dir: Path) -> None:
    """Once there is a checkpoint. Returns when the job runs again."""
    slurm.wait_for("a checkpoint", (run_dir / "checkpoints" / "latest").exists, timeout_s=400)
    slurm.kill_host(2)
    slurm.wait_for("the requeue", lambda: "PD" in slurm.call("squeue", "-ho%t"), timeout_s=300)
    slurm.start_node(2)
    slurm.wait_for(
        "the restart", lambda: slurm.call("squeue", "-hORestartCnt").split() == ["1"], timeout_s=300
    )


def _printed(folder: Path) -> str:
    return "\n".join(file.read_text() for file in sorted(folder.glob("mics-*.out")))


def _check_exports(runs: str, names: list[str]) -> None:
    """All folders load, and know the words they were trained on better than chance would."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

    kinds = {"llama-tiny": AutoModelForCausalLM, "roberta-tiny": AutoModelForMaskedLM}
    for name in names:
        model = kinds[name].from_pretrained(f"{runs}/{name}/hf").eval()
        tokens = AutoTokenizer.from_pretrained(f"{runs}/{name}/hf")(
            "There was once a miller who was angry with the river.", return_tensors="pt"
        )
        loss = model(**tokens, labels=tokens["input_ids"]).loss.item()
        assert loss < 0.9 * math.log(model.config.vocab_size), (name, loss)
