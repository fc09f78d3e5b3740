"""Training on token shards: batches for any number of ranks, settings, and the whole way."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mics.cli import main
from mics.data import TokenData, read_index
from mics.data.index import digest_of
from mics.data.packing import IGNORED, Objective
from mics.errors import SettingsError
from mics.train.config import DataSettings, ModelSettings, TrainConfig
from mics.train.data import Batches, Dealing
from mics.train.launch import _free_port
from mics.train.sequences import ShardSequences, open_sequences
from mics.train.settings_file import load_settings, parse_train_config
from tests.data.conftest import fables, tokenizer_folder
from tests.ranks import run_ranks
from tests.train.host_runs import train_as_rank
from tests.train.model_configs import config_file
from tests.train.rank_runs import train

_ALONE = ["--sharding.partition-size", "1", "--report.eval-interval", "1"]
__all__ = ["fables", "tokenizer_folder"]  # fixtures


def _batches(
    folders: list[TokenData],
    dealing: Dealing,
    *,
    rank: int,
    objective: Objective = "causal",
    weights: tuple[float, ...] = (),
) -> Batches:
    return Batches(
        sequences=ShardSequences(
            folders, seq_len=16, vocab_size=400, seed=3, weights=weights, objective=objective
        ),
        batch_size=dealing.batch_size,
        micro_steps=dealing.micro_steps,
        rank=rank,
        num_ranks=dealing.num_ranks,
        device=torch.device("cpu"),
    )


def _step(folders: list[TokenData], dealing: Dealing, step: int, **given: Any) -> torch.Tensor:
    """All sequences of a step in their order, tokens and targets: [2, sequence, token]."""
    dealt = [_batches(folders, dealing, rank=rank, **given).train(step) for rank in range(dealing.num_ranks)]
    pairs = [dealt[rank][micro] for micro in range(dealing.micro_steps) for rank in range(dealing.num_ranks)]
    return torch.stack([torch.cat([pair[part] for pair in pairs]) for part in (0, 1)])


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_a_run_goes_on_to_the_sample_on_other_ranks(fables: TokenData, objective: Objective) -> None:
    """Eight sequences a step, on 1 rank; on 2, on 4 and on 8 ranks later: the same, masks too."""
    folders, weights = [fables, fables], (1.0, 2.0)
    given: dict[str, Any] = {"objective": objective, "weights": weights}
    whole = Dealing(batch_size=8, micro_steps=1, num_ranks=1)
    on_two = Dealing(batch_size=2, micro_steps=2, num_ranks=2)
    expected = {step: _step(folders, whole, step, **given) for step in (1, 40, 41)}
    for later in (on_two, whole.over(4, most=2), whole.over(8, most=1)):
        assert later.num_sequences == 8
        for step, sequences in expected.items():
            assert torch.equal(_step(folders, later, step, **given), sequences)
    assert not torch.equal(expected[40], expected[41])
    if objective == "masked":
        assert ((expected[1][1] != IGNORED).sum(dim=1) == 2).all()  # of 14
    else:
        assert torch.equal(expected[1][0][:, 1:], expected[1][1][:, :-1])


def test_ranks_read_different_sequences(fables: TokenData) -> None:
    """An epoch on two ranks has every sequence once."""
    dealing = Dealing(batch_size=4, micro_steps=1, num_ranks=2)
    ranks = [_batches([fables], dealing, rank=rank) for rank in range(2)]
    num_steps = (fables.index.num_tokens("train") - 1) // 16 // 8
    pairs = [pair for step in range(1, num_steps + 1) for rank in ranks for pair in rank.train(step)]
    seen = [row.numpy().tobytes() for tokens, _ in pairs for row in tokens]
    assert len(set(seen)) > 0.99 * len(seen) == 0.99 * 8 * num_steps  # the text itself repeats a little


def test_prefetched_batches_are_the_same(fables: TokenData) -> None:
    batches = _batches([fables], Dealing(batch_size=2, micro_steps=2, num_ranks=1), rank=0)
    feed = batches.prefetch(first=5, last=8)
    for step in range(5, 9):
        found, waited = feed.get(step)
        assert waited >= 0
        for pair, expected in zip(found, batches.train(step), strict=True):
            assert all(map(torch.equal, pair, expected))
    feed.close()


def test_validation_is_the_same_at_every_call_and_apart_from_training(fables: TokenData) -> None:
    dealing = Dealing(batch_size=4, micro_steps=1, num_ranks=2)
    batches = _batches([fables], dealing, rank=1, objective="masked")
    first, second = (torch.cat([pair[0] for pair in batches.validation(3)]) for _ in range(2))
    assert first.shape == (12, 16)
    assert torch.equal(first, second)


def test_the_digest_is_of_all_that_decides_which_sequence_is_where(fables: TokenData) -> None:
    """Files, weights, length and seed; not where the folder is."""
    usual: dict[str, Any] = {"seq_len": 16, "vocab_size": 400, "seed": 0}
    first, *others = fables.index.shards
    index = replace(fables.index, shards=(replace(first, digest="0"), *others))
    changed = TokenData(fables.folder, index)
    found = [
        ShardSequences([fables], **usual).digest(),
        ShardSequences([fables, fables], **usual).digest(),
        ShardSequences([fables, fables], **usual, weights=(1, 2)).digest(),
        ShardSequences([fables], **{**usual, "seed": 1}).digest(),
        ShardSequences([fables], **{**usual, "seq_len": 8}).digest(),
        ShardSequences([changed], **usual).digest(),
    ]
    assert len(set(found)) == len(found)
    assert found[0] == ShardSequences([fables], **usual).digest()
    assert ShardSequences([fables], **usual).tokenizer == fables.index.tokenizer != "bytes"


def test_text_goes_through_the_tokenizer_of_the_shards(fables: TokenData) -> None:
    sequences = ShardSequences([fables], seq_len=16, vocab_size=400, seed=0)
    tokens = sequences.encode("There was once")
    assert len(tokens) < 14
    assert sequences.decode(tokens) == "There was once"


def _config(shards: Path, **model: Any) -> TrainConfig:
    settings = ModelSettings(**{"vocab_size": 400, **model})
    return TrainConfig(model=settings, data=DataSettings(shards=(shards,)))


def test_what_does_not_fit_is_named(fables: TokenData, tmp_path: Path) -> None:
    """The vocabulary, the length of a validation batch, another tokenizer, a shard cut short."""
    with pytest.raises(SettingsError, match=r"expected a vocabulary of at most the model's 300 .* found 400"):
        open_sequences(_config(fables.folder, vocab_size=300))
    with pytest.raises(SettingsError, match=r"\(train\): expected 65,537 tokens or more for one sequence"):
        open_sequences(_config(fables.folder, seq_len=65_536))
    with pytest.raises(SettingsError, match=r"data\.shards: expected 9,000 sequences or more for"):
        _batches([fables], Dealing(batch_size=9000, micro_steps=1, num_ranks=1), rank=0)
    text = tmp_path / "text.txt"
    text.write_text("a line\n" * 2000)
    other = tmp_path / "bytes"
    args = ["data", "prepare", str(text), "--tokenizer", "bytes", "--out", str(other), "--documents", "line"]
    assert main(args) == 0
    with pytest.raises(SettingsError, match=r"bytes: expected the tokenizer of .* found another \(bytes\)"):
        ShardSequences([fables, TokenData.open(other)], seq_len=16, vocab_size=400, seed=0)
    index = replace(fables.index, special=replace(fables.index.special, end_of_text=1))
    ending = TokenData(fables.folder, index)
    with pytest.raises(SettingsError, match=r"expected the special tokens of .* the same --end-of-text"):
        ShardSequences([fables, ending], seq_len=16, vocab_size=400, seed=0)


def test_weights_that_know_other_tokens_are_refused(fables: TokenData, tmp_path: Path) -> None:
    """The tokenizer in the folder of a model's weights decides, not how its file is written."""
    pytest.importorskip("transformers")
    model = config_file(tmp_path / "model", "llama", vocab_size=400).parent
    (model / "model.safetensors").touch()
    open_sequences(_config(fables.folder, name=str(model), vocab_size=None))
    assert fables.tokenizer_folder is not None
    content = (fables.tokenizer_folder / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(json.dumps(json.loads(content)))
    open_sequences(_config(fables.folder, name=str(model), vocab_size=None))
    changed = json.loads(content)
    vocab = changed["model"]["vocab"]
    vocab["!"], vocab['"'] = vocab['"'], vocab["!"]
    (model / "tokenizer.json").write_text(json.dumps(changed))
    with pytest.raises(SettingsError, match=r"with which the weights were trained, found another number for"):
        open_sequences(_config(fables.folder, name=str(model), vocab_size=None))
    open_sequences(_config(fables.folder, name=str(model), vocab_size=None, from_scratch=True))


def test_a_model_whose_padding_is_text_is_refused(fables: TokenData, tmp_path: Path) -> None:
    """That token would not learn, and RoBERTa would count no position where it stands."""
    pytest.importorskip("transformers")

    def opened(kind: str, pad_token: int, num_unknown: int = 0) -> None:
        replace(read_index(folder), num_unknown=num_unknown).write(folder)
        name = str(config_file(tmp_path / f"{kind}{pad_token}", kind, vocab_size=400, pad_token_id=pad_token))
        open_sequences(_config(folder, name=name, vocab_size=None))

    folder = Path(shutil.copytree(fables.folder, tmp_path / "copied"))
    file = folder / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text().replace('"unk_token": null', '"unk_token": "<unk>"'))
    replace(read_index(folder), tokenizer=digest_of(file)).write(folder)
    for kind, pad_token, num_unknown in (("roberta", 1, 5), ("roberta", 3, 0), ("llama", 2, 5)):
        opened(kind, pad_token, num_unknown)
    with pytest.raises(SettingsError, match=r"pad_token_id, 9, .* an ordinary token; .* one of null, 1, 3$"):
        opened("roberta", 9)
    for kind, pad_token, num_unknown in (("roberta", 4, 0), ("roberta", 2, 0), ("llama", 3, 5)):
        with pytest.raises(SettingsError, match="found a special token that is in them; set it"):
            opened(kind, pad_token, num_unknown)


def test_a_damaged_folder_ends_before_any_rank_starts(
    fables: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`mics train` names the shard; exit code 2, and no results."""
    monkeypatch.delenv("RANK", raising=False)
    folder = Path(shutil.copytree(fables.folder, tmp_path / "copied"))
    file = folder / "train-00000.npy"
    file.write_bytes(file.read_bytes()[:1000])
    args = ["train", "--data.shards", str(folder), "--model.vocab-size", "400"]
    args += ["--output-dir", str(tmp_path / "o")]
    assert main(args) == 2
    error = capsys.readouterr().err
    assert "train-00000.npy: expected a shard of 6,128 bytes, found 1,000" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "o").exists()


def test_shards_that_hold_nothing_out_are_trained_without_validation(tmp_path: Path) -> None:
    """One line says so; nothing of the results needs a validation loss."""
    (tmp_path / "text.txt").write_text("a line of text\n" * 1000)
    args = ["--tokenizer", "bytes", "--documents", "line", "--validation-share", "0"]
    shards = tmp_path / "shards"
    assert main(["data", "prepare", str(tmp_path / "text.txt"), "--out", str(shards), *args]) == 0
    given = ["--output-dir", str(tmp_path), "--data.shards", str(shards), "--steps", "2"]
    code, shown = run_ranks(1, train, _free_port(), [*given, *_ALONE], launch="variables")[0]
    assert code == 0 and shown.count("no validation: the shards hold nothing out") == 1
    assert json.loads((tmp_path / "demo/run.json").read_text())["final_validation_loss"] is None


def test_settings_take_lists(fables: TokenData, tmp_path: Path) -> None:
    """From a file and from flags; what does not fit together is an error."""
    folder = str(fables.folder)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"data": {"shards": [folder, folder], "weights": [1, "3e-1"]}}))
    data = load_settings(TrainConfig, file).data
    assert data.shards == (fables.folder, fables.folder)
    assert data.weights == (1.0, 0.3)
    assert data.tokenizer_folder == fables.folder / "tokenizer"
    flags = parse_train_config(["--data.shards", folder, folder, "--data.weights", "1", "2"]).data
    assert (flags.shards, flags.weights) == (data.shards, (1.0, 2.0))
    assert parse_train_config(["--config", str(file), "--data.weights", "5", "2"]).data.weights == (5.0, 2.0)
    assert DataSettings().tokenizer_folder is None
    for wrong, expected in (
        ({"weights": (1.0,)}, r"data\.weights: expected one for each of 0"),
        ({"shards": (fables.folder,), "weights": (-1.0,)}, r"data\.weights: expected numbers above 0"),
        ({"shards": (fables.folder,), "text": file}, "expected one of them, found both"),
    ):
        with pytest.raises(SettingsError, match=expected):
            DataSettings(**wrong)  # type: ignore[arg-type]
    file.write_text(yaml.safe_dump({"data": {"shards": [str(tmp_path)]}}))
    assert load_settings(TrainConfig, file).data.missing_shards == (tmp_path,)
    with pytest.raises(
        SettingsError, match=r"data\.shards: expected folders that mics data prepare has made"
    ):
        parse_train_config(["--config", str(file)])
    assert parse_train_config(["--config", str(file), "--data.shards", folder]).data.missing_shards == ()
    file.write_text(yaml.safe_dump({"data": {"shards": folder}}))
    with pytest.raises(SettingsError, match=r"data\.shards: expected a list"):
        load_settings(TrainConfig, file)


@pytest.mark.full
def test_training_on_shards_is_the_same_on_other_ranks(fables: TokenData, tmp_path: Path) -> None:
    """Two ranks, and four that go on from the middle: the same losses. The wait for data is measured."""

    def measured(name: str, ranks: int, *more: str) -> list[dict[str, Any]]:
        args = ["--name", name, "--output-dir", str(tmp_path), "--data.shards", str(fables.folder)]
        args += [str(fables.folder), "--data.weights", "1", "2", "--model.vocab-size", "400"]
        args += ["--global-batch", "8", "--batch-size", "2", "--report.interval", "1", "--data.verify"]
        args += ["--report.sample-tokens", "8", "--report.eval-batches", "1", "--checkpoint.interval", "2"]
        args += ["--launch.device", "cpu", "--optimizer.warmup-steps", "1", "--report.progress", "none"]
        run_ranks(ranks, train_as_rank, _free_port(), [*args, *more], str(tmp_path), launch="variables")
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [row for row in rows if "loss" in row]

    two = measured("two", 2, "--steps", "4")
    assert [row["data_wait"] >= 0 for row in two] == [True] * 4
    shutil.copytree(tmp_path / "two" / "checkpoints", tmp_path / "started")
    four = measured("four", 4, "--steps", "4", "--checkpoint.resume", str(tmp_path / "started" / "step-2"))
    losses = [row["loss"] for row in two]
    assert losses[0] > losses[-1]
    assert [row["loss"] for row in four] == pytest.approx(losses[2:], abs=2e-4)


@pytest.mark.gpu
def test_batches_come_to_the_gpu(fables: TokenData) -> None:
    """Loaded in a thread into pinned memory, and the same as on a CPU."""
    dealing = Dealing(batch_size=2, micro_steps=2, num_ranks=1)
    on_cpu = _batches([fables], dealing, rank=0, objective="masked")
    on_gpu = replace(on_cpu, device=torch.device("cuda", torch.cuda.current_device()))
    feed = on_gpu.prefetch(first=1, last=3)
    for step in range(1, 4):
        loaded, _ = feed.get(step)
        assert all(tensor.is_pinned() for pair in loaded for tensor in pair)
        for pair, expected in zip(on_gpu.on_device(loaded), on_cpu.train(step), strict=True):
            assert [tensor.device.type for tensor in pair] == ["cuda", "cuda"]
            assert all(torch.equal(tensor.cpu(), other) for tensor, other in zip(pair, expected, strict=True))
    feed.close()
