"""`mics train --dry-run`: what it prints is what a run would be, and nothing is started or written."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from mics.cli import main
from mics.data import read_index
from mics.data.documents import DocumentFormat
from mics.data.preparing import Preparing, prepare
from mics.data.tokenizer import BytesTokenizer
from mics.errors import SettingsError
from mics.train.dry_run import plan_run
from mics.train.sample import prompt_tokens
from mics.train.sequences import open_sequences
from mics.train.settings_file import parse_train_config


def test_it_prints_and_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MICS_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    assert main(["train", "--dry-run", "--launch.device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "nano: 382,272 parameters, fresh weights" in printed and "4 ranks = 2 nodes x 2" in printed
    assert "blocks.0 ... blocks.2" in printed and "memory per rank" in printed
    assert "sent per rank and step" in printed
    assert list(tmp_path.iterdir()) == []


def test_a_planned_cluster_that_is_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The engine's own choice where none is asked for; memory of the GPU that the settings name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MICS_CLUSTER", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    args = ["--model", "gpt-13b", "--nodes", "2", "--launch.ranks-per-node", "8", "--batch-size", "1"]
    found = plan_run(parse_train_config([*args, "--sharding.cluster", "p4d.24xlarge"]))
    assert (found.launch.num_ranks, found.setting.partition_size, found.param_nbytes) == (16, 16, 2)
    assert found.limit == pytest.approx(0.92 * 40 * 2**30)


def test_a_run_that_does_not_fit_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MICS_CLUSTER", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    asked = ["--sharding.cluster", "p4d.24xlarge", "--nodes", "2", "--launch.ranks-per-node", "8"]
    args = ["--model", "gpt-13b", "--sharding.partition-size", "1", *asked]
    assert main(["train", "--dry-run", *args]) == 1
    assert "does not fit: expected at most 36.8 GiB" in capsys.readouterr().out
    assert main(["train", "--dry-run", "--sharding.partition-size", "3", *asked]) == 2
    assert "expected a divisor of the 16 ranks, found 3" in capsys.readouterr().err


def test_layers_that_are_called_often_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of ALBERT activations are counted once, and the engine keeps those of each call."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MICS_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "embedding_size": 32}
    layers = {"model_type": "albert", "num_hidden_layers": 12, "num_hidden_groups": 3, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({**layers, **sizes}))
    assert main(["train", "--dry-run", "--launch.device", "cpu", "--model", "config.json"]) == 0
    assert "this model calls each 4 times" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("broken", ["cut", "vocabulary", "validation"])
def test_data_that_cannot_be_trained_on_is_named(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same errors as those of the run."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "text.txt").write_text("a line of text\n" * 1000)
    lines, share = DocumentFormat(separator="line"), 0.02 if broken == "validation" else 0.2
    files, shards = (tmp_path / "text.txt",), tmp_path / "shards"
    prepare(Preparing(files=files, out=shards, reading=lines, validation_share=share), BytesTokenizer())
    if broken == "vocabulary":
        dataclasses.replace(read_index(shards), vocab_size=300).write(shards)
    if broken == "cut":
        os.truncate(shards / "train-00000.npy", 100)
    expected = {
        "cut": "train-00000.npy: expected a shard of",
        "vocabulary": "found 300",
        "validation": "found 4",
    }
    args = ["--launch.device", "cpu", "--data.shards", str(shards)]
    assert main(["train", "--dry-run", *args]) == 2
    assert expected[broken] in capsys.readouterr().err


def test_parts_are_those_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks of other models have other parts than ours; a name with two colons is no emoji."""
    pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    described = {"model_type": "llama", "vocab_size": 256, "max_position_embeddings": 64, **shape}
    (tmp_path / "config.json").write_text(json.dumps(described))
    (tmp_path / "tiny_llama.py").write_text(
        "import transformers as t\n"
        f"def llama(): return t.LlamaForCausalLM(t.AutoConfig.for_model(**{described!r}))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    args = ["--launch.device", "cpu", "--model", "tiny_llama:llama", "--sharding.units", "parts"]
    assert main(["train", "--dry-run", *args]) == 0
    printed = capsys.readouterr().out
    assert "tiny_llama:llama: " in printed
    rows = [" ".join(line.split()[:3]) for line in printed.splitlines()]
    assert {"model.layers.*.self_attn 3 4,096", "model.layers.*.mlp 3 6,144"} <= set(rows)


@pytest.mark.parametrize(
    ("forward", "found"),
    [
        ("return self.head(tokens)", "found RuntimeError: "),
        ("return self.head(self.table(tokens)).mean()", r"found \[\]; change the model's forward"),
        ("return (self.head(self.table(tokens)),)", "found tuple; "),
        ("return self.head(self.table(tokens)).view(-1, 256)", r"found \[16, 256\]; "),
        ("return self.head(self.table(labels))", "found NameError: "),
        (
            "return self.head(self.table(tokens))[..., :200]",
            r"the 256 of the data, found \[1, 16, 200",
        ),
        ("return self.head(self.table(tokens))", ""),
        ("return self.head(self.table(tokens * int(tokens.max() < 256)))", ""),  # not to be had on meta
    ],
)
def test_a_model_that_makes_no_logits_of_tokens_is_refused(
    forward: str,
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before a rank starts, with what its forward does; where that cannot be tried, the run will say."""
    module = f"own_model_{abs(hash(forward))}"
    (tmp_path / f"{module}.py").write_text(
        "from torch import nn\n"
        "class Own(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)\n"
        f"    def forward(self, tokens):\n        {forward}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    args = ["--launch.device", "cpu", "--model", f"{module}:Own", "--model.seq-len", "16"]
    assert main(["train", "--dry-run", *args]) == (2 if found else 0)
    error = capsys.readouterr().err
    assert re.search(
        f"{module}:Own: expected a forward that takes tokens .*{found}" if found else "^$", error
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--report.prompt", "\udcff"], r"report\.prompt: expected text that .*; give another"),
        (["--output-dir", "/dev/null/x"], r"output_dir: expected a folder that can be written .* Not a dir"),
        (["--checkpoint.folder", "/dev/null/x"], r"checkpoint\.folder: expected a folder that can be wr"),
        (["--checkpoint.folder", "memory://x"], r"checkpoint\.folder: expected .* that all ranks share"),
    ],
)
def test_what_the_ranks_would_find_out_is_an_error_here(
    args: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["train", "--dry-run", "--launch.device", "cpu", *args]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_prompt_of_no_tokens_is_refused_where_a_sample_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some tokenizers make nothing of a space."""
    config = parse_train_config(["--report.prompt", " "])
    sequences = open_sequences(config)
    assert prompt_tokens(config, sequences) == [32]
    monkeypatch.setattr(type(sequences), "encode", lambda self, text: [])
    with pytest.raises(SettingsError, match=r"report\.prompt: expected text .* found ' '; give another"):
        prompt_tokens(config, sequences)
    assert prompt_tokens(parse_train_config(["--report.sample-tokens", "0"]), sequences) == []


def test_under_a_launcher_one_rank_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for rank, speaks in (("0", True), ("3", False)):
        for name, value in (("RANK", rank), ("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "4")):
            monkeypatch.setenv(name, value)
        assert main(["train", "--dry-run", "--launch.device", "cpu"]) == 0
        assert ("8 ranks = 2 nodes x 4" in capsys.readouterr().out) == speaks
