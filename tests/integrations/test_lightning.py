"""Programs of Lightning with only the strategy changed: the losses of one process, in every layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, ModelPruning, StochasticWeightAveraging

import mics
from mics.integrations.lightning import MicsFabricStrategy, MicsStrategy
from tests import tiers
from tests.integrations.lightning_runs import (
    OnMeta,
    Regression,
    TwoOptimizers,
    WithSGD,
    data,
    fit,
    fit_in_float16,
    fit_under_torchrun,
    mean_of,
    trainer,
    use_fabric,
    use_it_all,
)
from tests.ranks import run_expecting_error, run_ranks
from tests.tiers import some

TOLERANCE = 1e-5
ROOT = Path(__file__).resolve().parents[2]


@cache
def plain(kind: type[Regression] = Regression, **options: Any) -> dict[str, list[float]]:
    """One process, no strategy, the same global batches."""
    return run_ranks(1, fit, 1, None, options, kind, launch="none")[0][0]


def sharded(
    world_size: int,
    settings: dict[str, Any],
    kind: type[Regression] = Regression,
    kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, list[float]]:
    return mean_of(run_ranks(world_size, fit, world_size, settings, options, kind, kwargs=kwargs))


def check(
    found: dict[str, list[float]], expected: dict[str, list[float]], tolerance: float = TOLERANCE
) -> None:
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("accumulation", tiers.first([3, 1]))
def test_losses_norms_and_validation_are_those_of_one_process(accumulation: int) -> None:
    """Over partition sizes: losses, gradient norms, validation losses and learning rates."""
    options = {"accumulate_grad_batches": accumulation}
    expected = plain(**options)
    assert len(expected["norm"]) == 6 // accumulation and len(expected["val"]) == 1
    for partition_size in some([1, 2, 4]):
        check(sharded(4, {"partition_size": partition_size}, **options), expected)


def test_micro_steps_are_announced() -> None:
    """All but the last say that others follow. The epoch ends within an accumulation of four batches."""
    options = {"accumulate_grad_batches": 4, "limit_val_batches": 0}
    results = run_ranks(2, fit, 2, {"partition_size": 1}, options)
    check(mean_of(results), plain(**options))
    others, last = (True, False), (False, True)
    assert results[0][1] == [others] * 3 + [last] + [others, last]


@pytest.mark.parametrize("state_dict_type", [pytest.param("full", marks=pytest.mark.full), "sharded"])
def test_a_run_goes_on_on_two_ranks(state_dict_type: str, tmp_path: Path) -> None:
    """Saved after the first of two epochs; then as if nothing had happened, also from the meta device."""
    path = str(tmp_path / "model.ckpt")
    settings = {"state_dict_type": state_dict_type}
    expected = plain(max_epochs=2)
    first = sharded(4, {"partition_size": 2, **settings}, kwargs={"save_to": path})
    assert Path(path).is_dir() == (state_dict_type == "sharded")
    kind = OnMeta if state_dict_type == "sharded" else Regression
    second = sharded(2, {"partition_size": 2, **settings}, kind, kwargs={"ckpt_path": path}, max_epochs=2)
    check({name: first[name] + second[name] for name in first}, expected)
    if state_dict_type == "full":  # a file like any other
        [alone] = run_ranks(1, fit, 1, None, {"max_epochs": 2}, launch="none", kwargs={"ckpt_path": path})
        check(alone[0], {name: values[len(values) // 2 :] for name, values in expected.items()})


@pytest.mark.full
@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
def test_callbacks_and_the_other_loops(state_dict_type: str, tmp_path: Path) -> None:
    """ModelCheckpoint, EarlyStopping, validate, test and predict do what they do in one process."""
    for name in ("alone", "ranks"):
        (tmp_path / name).mkdir()
    [expected] = run_ranks(1, use_it_all, 1, None, str(tmp_path / "alone"), launch="none")
    settings = {"partition_size": 2, "state_dict_type": state_dict_type}
    found = run_ranks(2, use_it_all, 2, settings, str(tmp_path / "ranks"))
    assert expected["epochs"] == 2, "stopped in time"
    for rank, result in enumerate(found):
        torch.testing.assert_close(result.pop("predicted"), expected["predicted"][rank::2])
        assert result["kept"] == expected["kept"] and result["epochs"] == expected["epochs"]
        for name in ("val", "test", "test of best"):
            assert result[name] == pytest.approx(expected[name], rel=TOLERANCE)
    last = str(tmp_path / "ranks" / "last.ckpt")
    if state_dict_type == "full":
        model = Regression.load_from_checkpoint(last).eval()
        assert model.hparams["lr"] == 1e-2
        predicted = model(data(3).tensors[0]) * model.scale
        torch.testing.assert_close(predicted, expected["predicted"])
    else:
        assert Path(last).is_dir()


def test_manual_optimization_with_two_optimizers() -> None:
    """They take turns, toggled; the gradients of one alone are clipped."""
    check(sharded(2, {"partition_size": 1}, TwoOptimizers), plain(TwoOptimizers))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_clipped(algorithm: str) -> None:
    """By the norm of the whole model, or by value: the losses that follow are those of one process."""
    options = {"gradient_clip_val": 0.5 if algorithm == "norm" else 0.05}
    options |= {"gradient_clip_algorithm": algorithm, "limit_train_batches": 3, "limit_val_batches": 0}
    expected = plain(WithSGD, **options)
    assert expected["loss"] != plain(WithSGD, limit_train_batches=3, limit_val_batches=0)["loss"]
    check(sharded(2, {"partition_size": 2}, WithSGD, **options), expected)


@pytest.mark.parametrize("precision", tiers.first(["16-mixed", "bf16-mixed", "bf16-true"]))
def test_precisions(precision: str) -> None:
    """Modules compute in 16 bits, as in one process, and masters have 32."""
    options: dict[str, Any] = {"limit_val_batches": 0}
    run: Callable[..., Any] = fit
    if precision == "16-mixed":
        run = fit_in_float16
    else:
        options |= {"precision": precision}
    results = run_ranks(2, run, 2, {"partition_size": 2}, options)
    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    assert results[0][2] == {dtype}
    [(expected, _, _)] = run_ranks(1, run, 1, None, options, launch="none")
    check(mean_of(results), expected, tolerance=0.05)


def test_a_model_without_memory() -> None:
    """Built on the meta device in ``configure_model``: modules initialise themselves, and it learns."""
    found = sharded(2, {"partition_size": 2}, OnMeta, max_epochs=2, limit_val_batches=0)
    assert sum(found["loss"][6:]) < sum(found["loss"][:6])


def test_under_torchrun(tmp_path: Path) -> None:
    """The variables that torchrun sets are enough."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = run_ranks(2, fit_under_torchrun, store.port, str(tmp_path), launch="variables")
    check(mean_of(found), plain())


@pytest.mark.parametrize(
    ("accumulation", "state_dict_type"),
    [
        (2, "sharded"),
        *(pytest.param(*p, marks=pytest.mark.full) for p in [(1, "full"), (2, "full"), (1, "sharded")]),
    ],
)
def test_fabric(accumulation: int, state_dict_type: str, tmp_path: Path) -> None:
    """Setup, backward, announcements, clipping, save and load: what one process does."""
    [expected] = run_ranks(1, use_fabric, 1, None, accumulation, launch="none")
    for partition_size in some([1, 2, 4]):
        settings = {"partition_size": partition_size, "state_dict_type": state_dict_type}
        path = str(tmp_path / f"{partition_size}.ckpt")
        found = run_ranks(4, use_fabric, 4, settings, accumulation, path)
        assert found[0] == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
        assert found[1:] == found[:1] * 3
        assert Path(path).is_dir() == (state_dict_type == "sharded")


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: MicsStrategy(prefech=2), "prefech"),
        (lambda: MicsStrategy(state_dict_type="whole"), "state_dict_type"),
        (lambda: MicsFabricStrategy(precision="bf16"), "precision"),
        (lambda: trainer(1, MicsStrategy(), precision="64-true"), "'64-true'"),
        (lambda: trainer(1, MicsStrategy(), precision="16-true"), "'16-true'"),
        (lambda: L.Fabric(strategy=MicsFabricStrategy(), precision="64-true"), "'64-true'"),
        (
            lambda: trainer(1, MicsStrategy(precision=mics.Precision()), precision="bf16-mixed"),
            "expected it once",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_refused_at_construction(make: Callable[[], Any], names: str) -> None:
    with pytest.raises(mics.SettingsError, match=names):
        make()


class _Finetuning(BackboneFinetuning):
    """Without a backbone by that name."""

    def on_fit_start(self, *_: object) -> None:
        pass

    def freeze_before_training(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    "callback", [StochasticWeightAveraging(0.1), _Finetuning(), ModelPruning("l1_unstructured")]
)
def test_callbacks_that_cannot_work_are_refused(callback: Callback) -> None:
    for error in run_expecting_error(2, fit, 2, {}, {"callbacks": [callback]}):
        assert error.is_a("SettingsError") and type(callback).__name__ in error.message


def _set_up_fabric() -> None:
    fabric = L.Fabric(strategy=MicsFabricStrategy(), accelerator="cpu", devices=2)
    fabric.launch()
    model = torch.nn.Linear(4, 4)
    fabric.setup(model, torch.optim.Adafactor(model.parameters()))


class _WithAdafactor(L.LightningModule):
    """Has no batch: what is refused is refused before there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("this is too late")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


def _set_up_trainer() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 4)))
    trainer(2, MicsStrategy(), accumulate_grad_batches=2).fit(_WithAdafactor(), loader)


@pytest.mark.parametrize("set_up", [_set_up_fabric, _set_up_trainer])
def test_optimizers_are_checked_before_the_first_batch(set_up: Callable[[], None]) -> None:
    for error in run_expecting_error(2, set_up):
        assert error.is_a("SettingsError") and "Adafactor" in error.message


@pytest.mark.full
@pytest.mark.long  # the same fit runs under torchrun above, in a process of its own for each rank
def test_lightning_starts_the_ranks(tmp_path: Path) -> None:
    """A script without a launcher: Lightning starts it again for the other ranks."""
    script = tmp_path / "train.py"
    script.write_text(
        "import json, os, pathlib\n"
        "from tests.integrations.lightning_runs import fit\n"
        "seen, _, _ = fit(2, {'partition_size': 2}, {})\n"
        "pathlib.Path(f\"rank{os.environ.get('LOCAL_RANK', 0)}.json\").write_text(json.dumps(seen['val']))\n"
    )
    variables = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found == pytest.approx(plain()["val"], rel=TOLERANCE)
