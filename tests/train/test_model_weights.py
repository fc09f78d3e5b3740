"""Weights of Hugging Face folders go into shards and come out again; whole runs of their models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mics
from mics.data.tokenizer import BytesTokenizer
from mics.errors import SettingsError
from mics.models.descriptions import describe_model
from mics.train.checkpoints import check_places
from mics.train.config import ModelSettings, TrainConfig
from mics.train.export import _name_end, export_folder
from mics.train.launch import _free_port
from mics.train.model import build_model
from mics.train.objective import LanguageModelling
from tests import tiers
from tests.ranks import run_ranks
from tests.toys import seeded
from tests.train.model_configs import BOTH, OTHERS, config_file, ready_ranks  # noqa: F401
from tests.train.rank_runs import train
from tests.train.test_models import TIED, TiedBackwards

pytest.importorskip("transformers", minversion="5")  # which fill the buffers of models on meta
pytestmark = pytest.mark.usefixtures("ready_ranks")


# -- weights in and out ----------------------------------------------------------------------------------


def _save_plain(config: str, folder: str) -> None:
    """A model of transformers in several files, as `save_pretrained` writes it."""
    torch.manual_seed(11)
    model: Any = describe_model(config).make()
    model.save_pretrained(folder, max_shard_size="50KB")


def _loaded_and_exported(folder: str, out: str) -> tuple[float, float, float]:
    """Differences to a plain model: of logits, before and after an export, and of the exported weights."""
    import transformers

    described = describe_model(folder)
    auto = getattr(
        transformers, "AutoModelForCausalLM" if described.objective == "causal" else "AutoModelForMaskedLM"
    )
    settings = TrainConfig(model=ModelSettings(name=folder), seed=3)
    assert settings.model.weights is not None
    model = build_model(settings, rank=dist.get_rank()).model
    mics.load(settings.model.weights, model)
    tokens = torch.randint(3, 260, (2, 32), generator=seeded(1))
    model.eval()
    with torch.no_grad():
        logits = LanguageModelling(model, settings.model.build().objective or "causal").logits(tokens)
    export_folder(model, Path(out), sources=[settings.model.build().folder])
    plain, exported = (auto.from_pretrained(each).eval() for each in (folder, out))
    with torch.no_grad():
        one, two = (each(input_ids=tokens).logits for each in (plain, exported))
    ours, theirs = exported.state_dict(), plain.state_dict()
    bits = max((ours[name] - theirs[name]).abs().max().item() for name in theirs)
    return (logits - one).abs().max().item(), (logits - two).abs().max().item(), bits


@pytest.mark.parametrize("kind", [*BOTH, *OTHERS])
def test_weights_come_from_a_folder_and_go_to_one(tmp_path: Path, kind: str) -> None:
    """Read into shards as `from_pretrained` reads them, and written so that `from_pretrained` loads them."""
    folder, out = tmp_path / "given", tmp_path / "hf"
    run_ranks(1, _save_plain, str(config_file(tmp_path / "tiny", kind)), str(folder))
    (folder / "tokenizer.json").write_text("{}")
    check_places(TrainConfig(model=ModelSettings(name=str(folder))))
    found = run_ranks(2, _loaded_and_exported, str(folder), str(out))
    assert found == [(pytest.approx(0.0, abs=1e-6), pytest.approx(0.0, abs=1e-6), 0.0)] * 2
    assert (out / "tokenizer.json").is_file()
    assert (out / "generation_config.json").is_file() == (kind in ("llama", "gpt2", "qwen2"))
    written = json.loads((out / "config.json").read_text())
    assert written["dtype"] == "float32" and written["model_type"] == kind
    assert not list(tmp_path.glob(".hf*"))


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"num_hidden_layers": 3}, r"layers\.2\..*: expected a parameter of this name, found none, and"),
        ({"intermediate_size": 64}, r"proj\.weight: expected shape \(64, 32\), found \(48, 32\)"),
    ],
)
def test_weights_of_another_model_are_refused_before_ranks_start(
    tmp_path: Path, changed: dict[str, int], found: str
) -> None:
    """Names and shapes are compared without memory, in a dry run too."""
    file = config_file(tmp_path / "given", "llama")
    _save_plain(str(file), str(file.parent))
    described = json.loads(file.read_text())
    check_places(TrainConfig(model=ModelSettings(name=str(file.parent))))
    file.write_text(json.dumps({**described, **changed}))
    describe_model.cache_clear()
    with pytest.raises(SettingsError, match=found):
        check_places(TrainConfig(model=ModelSettings(name=str(file.parent))))


@pytest.mark.parametrize(
    ("named", "expected"), [(None, 0), (50256, 0), ([4, 9], 0), ([4, 0], [4, 0]), (4, 4)]
)
def test_generation_ends_where_documents_do(tmp_path: Path, named: Any, expected: Any) -> None:
    """Where the config names no token that ends anything; one that a given model ends with stays."""
    files = [tmp_path / name for name in ("config.json", "generation_config.json")]
    files[0].write_text(json.dumps({"model_type": "llama", "eos_token_id": named}))
    for file in files:
        _name_end(file, BytesTokenizer.special)
    assert json.loads(files[0].read_text()) == {"model_type": "llama", "eos_token_id": expected}
    assert not files[1].exists()


# -- whole runs ------------------------------------------------------------------------------------------


def _losses(run_dir: Path) -> list[float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        row.get("loss", row.get("validation_loss")) for row in rows if "checkpoint_stall_seconds" not in row
    ]


def _run(tmp_path: Path, model: str, name: str, ranks: int, *args: str) -> str:
    given = ["--output-dir", str(tmp_path), "--name", name, "--model", model, *args]
    given += ["--batch-size", str(8 // ranks), "--sharding.partition-size", str(min(2, ranks))]
    found = run_ranks(ranks, train, _free_port(), given, launch="variables", ranks_per_node=2)
    assert [code for code, _ in found] == [0] * ranks
    return str(found[0][1])


@pytest.mark.parametrize("kind", tiers.first(BOTH, 0, 1))
def test_a_run_on_four_ranks_has_the_losses_of_one(tmp_path: Path, kind: str) -> None:
    """Trained, sampled and exported; a run that goes on from a checkpoint has the same losses to the bit."""
    model = str(config_file(tmp_path / "tiny", kind))
    options = ["--steps", "6", "--report.save-weights", "--report.sample-tokens", "4"]
    shown = _run(tmp_path, model, "four", 4, *options)
    assert f"tiny ({kind})" in shown and "fresh weights" in shown
    assert ("The model writes:" in shown) == (kind == "llama")
    _run(tmp_path, model, "one", 1, *options)
    assert _losses(tmp_path / "one") == pytest.approx(_losses(tmp_path / "four"), rel=1e-4)
    summary = json.loads((tmp_path / "four/run.json").read_text())
    assert summary["final_loss"] < summary["first_loss"]
    assert not (tmp_path / "four/model.pt").exists()
    loss = run_ranks(1, _loss_of_export, str(tmp_path / "four/hf"))[0]
    assert loss == pytest.approx(run_ranks(1, _loss_of_export, str(tmp_path / "one/hf"))[0], rel=1e-3)

    whole = _losses(tmp_path / "four")
    checkpoint = str(tmp_path / "four/checkpoints/step-4")
    _run(tmp_path, model, "on", 4, *options, "--checkpoint.resume", checkpoint)
    assert _losses(tmp_path / "on") == whole[-len(_losses(tmp_path / "on")) :]


def _loss_of_export(folder: str) -> float:
    import transformers

    masked = describe_model(folder).objective == "masked"
    auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder).eval()
    tokens = torch.randint(3, 260, (2, 32), generator=seeded(1))
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens).loss)


@pytest.mark.full
def test_a_function_is_trained(tmp_path: Path) -> None:
    """Weights of a model that is not of transformers are a state dict."""
    options = ["--steps", "4", "--model.seq-len", "16", "--report.save-weights"]
    _run(tmp_path, TIED, "tied", 2, *options)
    losses = _losses(tmp_path / "tied")
    assert losses[-1] < losses[0]
    TiedBackwards().load_state_dict(torch.load(tmp_path / "tied/model.pt"))
