"""The examples, run as their users run them on CPU ranks, with small arguments; one also by torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mics.cli import main
from tests.programs import run_program

REPOSITORY: Final = Path(__file__).parents[1]
EXAMPLES: Final = REPOSITORY / "examples"
TEXT: Final = REPOSITORY / "src" / "mics" / "train" / "fables.txt"


def _start(num_ranks: int, script: str, *, cwd: Path) -> subprocess.Popen[str]:
    """By torchrun, in processes that can be killed."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",  # NCCL wants a GPU for each rank
    }
    return subprocess.Popen(
        [sys.executable, *launch, str(EXAMPLES / script)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _run(num_ranks: int, script: str, *args: object, cwd: Path) -> str:
    """What an example that must succeed prints."""
    return run_program(num_ranks, EXAMPLES / script, *args, cwd=cwd)


def _numbers(pattern: str, output: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, output)]


def _weights(checkpoint: Path, out: Path) -> dict[str, Tensor]:
    """The whole parameters of a checkpoint."""
    assert main(["checkpoint", "export", str(checkpoint), str(out)]) == 0
    return {name: t for file in out.glob("*.safetensors") for name, t in load_file(file).items()}


def test_examples_are_short() -> None:
    """At most 120 lines each, and 30 lines of code in the one that the README shows."""
    for file in EXAMPLES.rglob("*.py"):
        assert len(file.read_text().splitlines()) <= 120, file
    text = (EXAMPLES / "minimal.py").read_text()
    assert sum(bool(line.split("#")[0].strip()) for line in text.splitlines()) <= 30
    readme = (EXAMPLES.parent / "README.md").read_text()
    assert f"```python\n{text}```" in readme, "the README shows another script"
    assert len(readme.splitlines()) <= 110 and max(map(len, readme.splitlines())) <= 110


# -- minimal.py -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Output and working folder of `minimal.py` on two ranks, from beginning to end."""
    folder = tmp_path_factory.mktemp("minimal")
    return _run(2, "minimal.py", cwd=folder), folder


def _losses_by_epoch(output: str) -> dict[int, float]:
    """The mean of all ranks' losses at the end of each epoch."""
    found: dict[int, list[float]] = {}
    for epoch, loss in re.findall(r"epoch (\d+), loss ([\d.]+)", output):
        found.setdefault(int(epoch), []).append(float(loss))
    return {epoch: sum(losses) / len(losses) for epoch, losses in found.items()}


@pytest.mark.full
def test_minimal_trains(uninterrupted: tuple[str, Path]) -> None:
    """Ten epochs, a falling loss and the last two checkpoints."""
    output, folder = uninterrupted
    losses = _losses_by_epoch(output)
    assert list(losses) == list(range(10))
    assert losses[9] < 0.8 * losses[0]
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["latest", "step-10", "step-9"]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The working folder of `minimal.py` on four ranks of which one was killed after the first checkpoint."""
    process = _start(4, "minimal.py", cwd=tmp_path)
    try:
        deadline = time.monotonic() + 240
        while not (tmp_path / "checkpoints" / "latest").exists():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.02)
        os.kill(_children(process.pid)[1], signal.SIGKILL)
        output, _ = process.communicate(timeout=120)
        assert process.returncode != 0
        assert 9 not in _losses_by_epoch(output)
    finally:
        process.kill()
        process.wait()
    return tmp_path


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_minimal_resumes_on_fewer_ranks(
    killed: Path, uninterrupted: tuple[str, Path], tmp_path: Path
) -> None:
    """Two of four ranks continue after the checkpoint and end with the weights of a run without a failure."""
    saved = int((killed / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))
    losses = _losses_by_epoch(_run(2, "minimal.py", cwd=killed))
    assert list(losses) == list(range(saved, 10))
    expected = _losses_by_epoch(uninterrupted[0])
    assert losses == pytest.approx({epoch: expected[epoch] for epoch in losses}, rel=1e-2)
    torch.testing.assert_close(
        _weights(killed / "checkpoints", tmp_path / "resumed"),
        _weights(uninterrupted[1] / "checkpoints", tmp_path / "expected"),
        rtol=0,
        atol=1e-2,
    )


# -- The others -----------------------------------------------------------------------------------------


@pytest.mark.full
def test_pretraining_resumes_on_other_ranks(tmp_path: Path) -> None:
    """Steps 5 to 8 on one rank after four on two: data, schedule and losses of eight steps on two."""
    sizes = (
        "--layers 2 --width 32 --heads 2 --context 32 --batch-size 2 --global-batch 8 --warmup 8 --lr 1e-2"
    )
    args = ["--data", TEXT, *sizes.split(), "--interval", 4, "--eval-batches", 2]
    whole = _run(2, "pretrain_gpt.py", *args, "--out", "whole", "--steps", 8, cwd=tmp_path)
    losses = _numbers(r" loss ([\d.]+)", whole)
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    assert len(_numbers(r"val_loss ([\d.]+)", whole)) == 2

    first = _run(2, "pretrain_gpt.py", *args, "--out", "parts", "--steps", 4, cwd=tmp_path)
    then = _run(1, "pretrain_gpt.py", *args, "--out", "parts", "--steps", 8, cwd=tmp_path)
    assert _numbers(r"step (\d+) lr", then) == [5, 6, 7, 8]
    assert _numbers(r" loss ([\d.]+)", first + then) == pytest.approx(losses, rel=1e-3)
    assert _numbers(r" lr ([\d.e+-]+)", first + then) == _numbers(r" lr ([\d.e+-]+)", whole)


@pytest.mark.full
def test_exported_folder_loads_with_transformers(tmp_path: Path) -> None:
    """`from_pretrained` gives a model with the evaluation loss that the example printed last."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "text").write_bytes(TEXT.read_bytes()[: 160 * 32])
    args = ["--text", "text", "--length", 32, "--out", "exported", "--lr", 3e-3]
    output = _run(2, "hf_finetune.py", *args, cwd=tmp_path)
    before, after = _numbers(r"eval_loss ([\d.]+)", output)
    assert after < before - 0.5

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    held_out = torch.tensor(list((tmp_path / "text").read_bytes())).view(160, 32)[144:]
    with torch.no_grad():
        loss = model(input_ids=held_out, labels=held_out).loss
    assert loss.item() == pytest.approx(after, abs=1e-3)


@pytest.mark.full
def test_vision_learns(tmp_path: Path) -> None:
    """The loss falls, and held-out images are told apart far better than by chance (1/4)."""
    args = "--images 512 --batch-size 16 --epochs 3 --width 32 --depth 2 --lr 3e-3"
    output = _run(2, "vision.py", *args.split(), cwd=tmp_path)
    losses, accuracies = _numbers(r"loss ([\d.]+)", output), _numbers(r"accuracy ([\d.]+)", output)
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert accuracies[-1] > 0.5


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_average_of_adapters(tmp_path: Path) -> None:
    """The average lags behind the trained adapters, what is frozen is the same in both, and a run goes on."""
    pytest.importorskip("transformers")
    args = ["--text", TEXT, "--length", 32, "--batch-size", 4, "--lr", 1e-2, "--decay", 0.9, "--out", "lora"]
    output = _run(2, "ema_and_lora.py", *args, "--steps", 8, cwd=tmp_path)
    ((trained_loss, average_loss),) = re.findall(r"eval_loss ([\d.]+) ema_eval_loss ([\d.]+)", output)
    assert float(trained_loss) < 5.5 and trained_loss != average_loss

    trained = _weights(tmp_path / "lora" / "trained", tmp_path / "trained")
    average = _weights(tmp_path / "lora" / "ema", tmp_path / "ema")
    adapters = load_file(tmp_path / "lora" / "adapters.safetensors")
    assert adapters.keys() == {name for name in average if "lora_" in name}
    for name, value in average.items():
        assert torch.equal(value, adapters.get(name, trained[name]))
    for name in (name for name in adapters if "lora_b" in name):  # zero at first
        assert 0 < average[name].norm() < trained[name].norm()

    assert "step 10 " in _run(1, "ema_and_lora.py", *args, "--steps", 10, cwd=tmp_path)


@pytest.mark.full
def test_torchtitan_model_is_that_of_one_process(tmp_path: Path) -> None:
    """Two steps on two ranks and two on one: losses and norms of four steps on one."""
    if find_spec("torchtitan") is None or find_spec("triton") is None:
        pytest.skip("needs torchtitan, whose models import triton")
    sizes = "--streams 2 --batch-size 2 --length 32 --interval 2 --lr 1e-3"
    args = ["--text", TEXT, *sizes.split()]
    whole = _run(1, "torchtitan_model.py", *args, "--out", "whole", "--steps", 4, cwd=tmp_path)
    first = _run(2, "torchtitan_model.py", *args, "--out", "parts", "--steps", 2, cwd=tmp_path)
    then = _run(1, "torchtitan_model.py", *args, "--out", "parts", "--steps", 4, cwd=tmp_path)
    losses, found = (_numbers(r" loss ([\d.]+)", output) for output in (whole, first + then))
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert found == pytest.approx(losses, rel=1e-5)
    norms, found = (_numbers(r" norm ([\d.]+)", output) for output in (whole, first + then))
    assert found == pytest.approx(norms, rel=1e-3)  # of a tensor with 500,000 elements, in float32
