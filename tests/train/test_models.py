"""Any model that `mics plan` takes is trained by `mics train`, and comes out as transformers load it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mics
from mics.cost.modules import find_model
from mics.errors import SettingsError
from mics.models import GPT_SIZES
from mics.models.descriptions import describe_model
from mics.train.config import ModelSettings, TrainConfig
from mics.train.model import _flops_per_token, build_model
from mics.train.objective import IGNORED, LanguageModelling
from mics.train.settings_file import parse_train_config
from mics.train.setup import Setup
from mics.utils.deprecation import new_flags
from tests import tiers
from tests.ranks import run_ranks
from tests.toys import seeded
from tests.train.model_configs import BOTH, CONFIGS, OTHERS, config_file, ready_ranks  # noqa: F401

pytest.importorskip("transformers", minversion="5")  # which fill the buffers of models on meta


def _settings(name: str | Path, **options: Any) -> TrainConfig:
    return TrainConfig(model=ModelSettings(name=str(name), **options), seed=3)


class TiedBackwards(nn.Module):
    """The head comes first, and would leave the padding row of the embedding it shares not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 300, bias=False)
        self.embedding = nn.Embedding(300, 8, padding_idx=5)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens))
        return logits


def build_tied() -> nn.Module:
    """For `module:function`."""
    return TiedBackwards()


def build_masked() -> nn.Module:
    model = TiedBackwards()
    model.objective = "masked"  # type: ignore[assignment]
    return model


TIED = f"{__name__}:build_tied"


# -- what a description means ----------------------------------------------------------------------------


def test_a_folder_is_planned_like_its_config(tmp_path: Path) -> None:
    """`--model FOLDER` and `--model FOLDER/config.json` are one model, of which every parameter counts."""
    file = config_file(tmp_path / "tiny", "llama")
    shape = find_model(str(file.parent))
    assert shape.units == find_model(str(file)).units
    with torch.device("meta"):
        model = describe_model(str(file)).make()
    assert shape.num_parameters == sum(param.numel() for param in model.parameters())
    assert (shape.seq_len, shape.vocab_size) == (32, 260)


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("llama", {}, "causal"),
        ("gpt2", {"architectures": ["GPT2LMHeadModel"]}, "causal"),
        ("roberta", {}, "masked"),
        ("roberta", {"architectures": ["RobertaForMaskedLM"]}, "masked"),
        ("roberta", {"architectures": ["RobertaForCausalLM"], "is_decoder": True}, "causal"),
    ],
)
def test_the_kind_of_model_chooses_the_objective(
    tmp_path: Path, kind: str, changes: dict[str, Any], expected: str
) -> None:
    """By what the config names, else by what the type is for. RoBERTa's first two positions are padding's."""
    found = _settings(config_file(tmp_path / "tiny", kind, **changes)).model.build()
    assert (found.objective, found.seq_len, found.title) == (expected, 32, f"tiny ({kind})")
    class_name = type(_on_meta(found)).__name__
    assert class_name.endswith("ForMaskedLM") == (expected == "masked")


def _on_meta(found: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = found.make()
    return model


@pytest.mark.parametrize(
    ("kind", "changes", "objective"),
    [
        ("roberta", {}, "causal"),
        ("roberta", {"architectures": ["RobertaForCausalLM"]}, "auto"),
        ("roberta", {"is_decoder": True}, "masked"),
        ("bert-generation", {**CONFIGS["roberta"], "max_position_embeddings": 32}, "auto"),
        ("xlm", {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32}, "causal"),
        ("llama", {}, "auto"),
    ],
)
def test_the_objective_decides_which_tokens_are_seen(
    tmp_path: Path, kind: str, changes: dict[str, Any], objective: Any
) -> None:
    """A causal model does not see the tokens that it predicts, whatever its class does by itself."""
    file = config_file(tmp_path / "tiny", kind, **{"vocab_size": 260, **changes})
    found = _settings(file, objective=objective).model.build()
    torch.manual_seed(0)
    model = found.make().eval()
    tokens = torch.arange(5, 21)[None]
    other = tokens.clone()
    other[0, -1] = 30
    with torch.no_grad():
        before, after = (model(given).logits[0, :-1] for given in (tokens, other))
    assert torch.equal(before, after) == (found.objective == "causal")


def test_named_sizes_of_both_kinds_are_trainable() -> None:
    """BERT's and RoBERTa's by name; another objective changes what tokens see."""
    assert {name for name in GPT_SIZES if ModelSettings(name=name).build().objective == "masked"} == {
        name for name, config in GPT_SIZES.items() if not config.causal
    }
    changed = ModelSettings(objective="masked").build()
    assert changed.gpt is not None and not changed.gpt.causal
    assert (changed.objective, changed.title) == ("masked", "nano (changed)")


def test_a_function_says_its_objective() -> None:
    """Causal unless the model or the settings say otherwise; numbers come from its modules."""
    found = _settings(TIED, seq_len=16).model.build()
    assert (found.objective, found.hidden_size, found.vocab_size) == ("causal", 8, 300)
    assert _settings(f"{__name__}:build_masked", seq_len=16).model.build().objective == "masked"
    assert _settings(TIED, seq_len=16, objective="masked").model.build().objective == "masked"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "gpt-124"}, r"--model 'gpt-124': expected a named size.*did you mean .*gpt-124m"),
        ({"name": "org/model"}, r"--model org/model: expected a folder.*no such folder; download"),
        ({"name": "{}"}, r"expected a Hugging Face config.json there, found bin, broken.json, llama, \.\.\."),
        ({"name": "{}/missing/config.json"}, r"config.json: No such file"),
        ({"name": "{}/broken.json"}, r"broken.json: expected JSON, found"),
        ({"name": "{}/plain.json"}, r"expected a Hugging Face config with model_type, found \['a'\]"),
        ({"name": "{}/t5"}, r"--model t5 \(t5\): expected a causal or a masked language model.*llama"),
        (
            {"name": "{}/llama", "num_layers": 1},
            r"model\.num_layers: expected it unset beside .*found 1; leave it out and change its config",
        ),
        ({"name": "{}/llama", "seq_len": 64}, r"model\.seq_len: expected at most the 32 positions"),
        ({"name": "{}/xlnet"}, r"--model xlnet \(xlnet\): expected a causal or a masked language model"),
        ({"name": "{}/llama", "objective": "masked"}, r"model\.objective: expected one that AutoModelForM"),
        ({"name": TIED, "vocab_size": 400}, r"leave it out and change the function that builds it"),
        ({"name": "{}/bin"}, r"expected weights as safetensors, found pytorch_model.bin; convert"),
        (
            {"name": "{}/none"},
            r"none: expected the 2 files that model.safetensors.index.json names, found 0 of",
        ),
        (
            {"name": "{}/partly"},
            r"found 1 of them, b.safetensors is missing; download .*--model.from-scratch",
        ),
        ({"name": "{}/torn"}, r"torn/model.safetensors.index.json: expected JSON with a weight_map"),
        ({"name": TIED}, r"model\.seq_len: expected the tokens per sequence of tests"),
        ({"name": "tests.nowhere:build"}, r"expected module:function, found: No module"),
        ({"name": "{}/small"}, r"model\.vocab_size: expected at least 256"),
    ],
)
def test_a_model_that_cannot_be_trained_is_one_line(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    """Which setting, what was expected, what was found."""
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "plain.json").write_text('{"a": 1}')
    config_file(tmp_path / "t5", "t5", d_model=8, num_layers=1, num_heads=2, d_ff=8, vocab_size=300)
    config_file(tmp_path / "xlnet", "xlnet", d_model=8, n_layer=1, n_head=2, d_inner=8, vocab_size=300)
    config_file(tmp_path / "llama", "llama")
    config_file(tmp_path / "small", "llama", vocab_size=100)
    config_file(tmp_path / "bin", "llama")
    (tmp_path / "bin/pytorch_model.bin").write_bytes(b"pickle")
    for name in ("none", "partly", "torn"):  # downloads that were interrupted
        config_file(tmp_path / name, "llama")
        index = {"weight_map": {"one": "a.safetensors", "two": "b.safetensors"}}
        text = json.dumps(index)[: 9 if name == "torn" else None]
        (tmp_path / name / "model.safetensors.index.json").write_text(text)
    (tmp_path / "partly/a.safetensors").touch()
    options["name"] = options["name"].replace("{}", str(tmp_path))
    with pytest.raises(SettingsError, match=message) as caught:
        TrainConfig(model=ModelSettings(**options))
    assert "\n" not in str(caught.value)


def test_without_transformers_it_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where a config asks for it."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers.*pip install 'mics-torch\[transformers\]'"):
        ModelSettings(name=str(config_file(tmp_path / "tiny", "llama")))
    assert ModelSettings(name="bert-10b").build().objective == "masked"


def test_the_model_has_a_short_flag_and_an_old_one(tmp_path: Path) -> None:
    """`--model`, `--model.name`, `model: {name: ...}`; `model.size` warns."""
    file = tmp_path / "run.yaml"
    file.write_text("model: {name: gpt-tiny}\n")
    for args in (["--model", "gpt-tiny"], ["--model.name", "gpt-tiny"], ["--config", str(file)]):
        assert parse_train_config(args).model.name == "gpt-tiny"
    with pytest.warns(FutureWarning, match=r"--model\.size is now --model\.name"):
        args = new_flags("train", ["--model.size", "gpt-tiny"])
    assert parse_train_config(args).model.name == "gpt-tiny"
    file.write_text("model: {size: gpt-tiny}\n")
    with pytest.warns(FutureWarning, match=r"model\.size is now model\.name"):
        assert parse_train_config(["--config", str(file)]).model.name == "gpt-tiny"


@pytest.mark.parametrize("name", ["nano", "gpt-tiny", "bert-10b"])
def test_work_is_counted_alike_from_a_module(name: str) -> None:
    """FLOPs per token from the modules are those that a named size has by its own arithmetic."""
    found = describe_model(name)
    assert found.gpt is not None
    as_module = describe_model(name).__class__(
        **{**vars(found), "gpt": None}  # as if somebody had built it
    )
    assert _flops_per_token(_on_meta(found), as_module) == found.gpt.flops_per_token


# -- initial values --------------------------------------------------------------------------------------


def _initial(name: str) -> dict[str, Tensor]:
    config = TrainConfig(model=ModelSettings(name=name), seed=3)
    return mics.full_state_dict(build_model(config, rank=dist.get_rank()).model)


@pytest.mark.parametrize("kind", [*BOTH, *OTHERS])
@pytest.mark.usefixtures("ready_ranks")
def test_initial_values_do_not_depend_on_the_ranks(tmp_path: Path, kind: str) -> None:
    """To the bit on 1, 2 and 4 ranks; as wide as those of a model that transformers build."""
    file = config_file(tmp_path / "tiny", kind)
    first, *others = (run_ranks(size, _initial, str(file))[0] for size in (1, 2, 4))
    plain = describe_model(str(file)).make().state_dict()
    assert list(first) == list(plain)
    for name, value in first.items():
        assert all(torch.equal(value, other[name]) for other in others), name
        assert value.isfinite().all()
        assert torch.equal(value == 0, plain[name] == 0), name  # biases, rows of padding tokens
        if value.numel() > 500:
            assert value.std().item() == pytest.approx(plain[name].std().item(), rel=0.2), name
        else:
            assert value.mean().item() == pytest.approx(plain[name].mean().item(), abs=0.02), name


def _formats(name: str) -> tuple[str, set[torch.dtype]]:
    model = build_model(TrainConfig(model=ModelSettings(name=name)), rank=dist.get_rank()).model
    return Setup.of(model).precision, {value.dtype for value in mics.full_state_dict(model).values()}


@pytest.mark.usefixtures("ready_ranks")
def test_the_format_of_a_configs_weights_does_not_decide_that_of_the_run(tmp_path: Path) -> None:
    """`sharding.param_dtype` auto is fp32 on CPUs, also of a model whose weights are stored in bf16."""
    file = config_file(tmp_path / "tiny", "qwen2", dtype="bfloat16")
    assert run_ranks(1, _formats, str(file)) == [("fp32", {torch.float32})]


def _tied_rows() -> Tensor:
    with torch.device("meta"):
        model = build_tied()
    return mics.full_state_dict(mics.shard(model, partition_size=1))["embedding.weight"]


def test_a_tied_embedding_keeps_its_own_values() -> None:
    """A head that shares the matrix does not overwrite it: the padding row is zero, others are N(0, 1)."""
    (rows,) = run_ranks(1, _tied_rows)
    assert not rows[5].any()
    assert rows.std().item() == pytest.approx(1.0, rel=0.1)


# -- masked language modelling ---------------------------------------------------------------------------


def _masked_batch(number: int) -> tuple[Tensor, Tensor]:
    """One sequence. How many of its tokens are masked differs; some have none."""
    generator = seeded(number)
    tokens = torch.randint(3, 256, (1, 32), generator=generator)
    targets = torch.full_like(tokens, IGNORED)
    masked = torch.randperm(32, generator=generator)[: 3 * (number % 4)]
    targets[0, masked] = tokens[0, masked]
    return tokens, targets


def _masked_step(name: str, num_sequences: int) -> tuple[float, float, dict[str, Tensor | None]]:
    """Losses of a step and of a validation, and gradients, on the sequences dealt out to the ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = TrainConfig(model=ModelSettings(name=name, objective="masked"), seed=3)
    model = build_model(config, rank=rank).model
    objective = LanguageModelling(model, "masked")
    batches = [_masked_batch(number) for number in range(rank, num_sequences, size)]
    divisor = objective.divisor(batches)
    total = torch.zeros(())
    for batch in mics.microsteps(model, batches):
        loss = objective.loss(batch, divisor=divisor, num_batches=len(batches))
        loss.backward()
        total += loss.detach()
    gradients = mics.full_gradients(model)
    validation = objective.mean_loss(batches)
    dist.all_reduce(total)
    dist.all_reduce(validation)
    return total.item() / size, validation.item() / size, gradients


@pytest.mark.usefixtures("ready_ranks")
@pytest.mark.parametrize("name", tiers.first(["roberta", "nano"]))
def test_masked_losses_are_means_over_all_masked_tokens(tmp_path: Path, name: str) -> None:
    """Four ranks find the loss and the gradients of one, however many tokens of each are masked."""
    if name == "roberta":
        name = str(config_file(tmp_path / "tiny", "roberta"))
    loss, validation, gradients = run_ranks(1, _masked_step, name, 8)[0]
    assert loss == pytest.approx(math.log(260), rel=0.1)
    assert validation == pytest.approx(loss, rel=1e-6)
    found = run_ranks(4, _masked_step, name, 8)
    assert found[0][:2] == pytest.approx((loss, validation), rel=1e-6)
    for key, value in gradients.items():
        assert value is not None
        torch.testing.assert_close(found[0][2][key], value, rtol=1e-4, atol=1e-6)
