"""Models of Hugging Face's transformers, from their ``config.json``. One that is read imports the package.

Which objective a config stands for::

    architectures: ["RobertaForMaskedLM"]   masked     what the config names counts first
    architectures: ["GPT2LMHeadModel"]      causal
    model_type: bert, roberta, ...          masked     else what transformers has for the type
    model_type: llama, gpt2, qwen2, ...     causal
    t5, whisper, vit, ...                   None
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Final, Literal

from torch import nn

from mics.errors import SettingsError
from mics.utils.extras import require

Objective = Literal["causal", "masked"]

CONFIG: Final = "config.json"
WIDTH_NAMES: Final = ("hidden_size", "n_embd", "d_model", "dim")
LENGTH_NAMES: Final = ("max_position_embeddings", "n_positions", "seq_len", "max_seq_len")
HEADS_NAMES: Final = ("num_attention_heads", "n_head", "num_heads")
_WEIGHTS: Final = ("*.safetensors", "*.safetensors.index.json")
FRESH: Final = "begin with fresh weights: --model.from-scratch"
_SHOWN: Final = "llama, mistral, qwen2, gpt2, gpt_neox, bert, roberta, ..."
_AUTO: Final = {"causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM"}
# Their positions begin after that of the padding token, so that many fewer are of use.
_POSITIONS_AFTER_PADDING: Final = frozenset(
    {
        "camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta",
        "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
    }
)  # fmt: skip
# Permutations decide what a token sees: without them it sees the one that it is to predict.
_NOT_CAUSAL: Final = frozenset({"xlnet"})


def config_number(config: Any, names: tuple[str, ...]) -> int | None:
    """The first of these names that a config has a count under."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if type(value) is int and value > 0), None)


def usable_length(config: Any) -> int:
    """The most tokens that a sequence may have; 0: the config does not say."""
    length = config_number(config, LENGTH_NAMES) or 0
    if getattr(config, "model_type", None) in _POSITIONS_AFTER_PADDING:
        length -= 1 + (getattr(config, "pad_token_id", None) or 0)
    return max(0, length)


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights of any format, or an index that names some."""
    patterns = (*_WEIGHTS, "pytorch_model*.bin", "pytorch_model*.bin.index.json")
    return any(any(folder.glob(pattern)) for pattern in patterns)


def check_weights(folder: Path) -> None:
    """Raise if weights of a folder are missing, or of no format that is read straight into shards."""
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise SettingsError(
            f"--model {folder}: expected weights as safetensors, found pytorch_model.bin; convert them, or "
            f"{FRESH}"
        )
    for index in sorted(folder.glob(_WEIGHTS[1])):
        named = _named_files(index)
        missing = [name for name in named if not (folder / name).is_file()]
        if missing:
            raise SettingsError(
                f"--model {folder}: expected the {len(named)} files that {index.name} names, found "
                f"{len(named) - len(missing)} of them, {missing[0]} is missing; download the model again, or "
                f"{FRESH}"
            )


def _named_files(index: Path) -> list[str]:
    """The files of weights that an index names."""
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SettingsError(
            f"--model {index}: expected JSON with a weight_map of tensors to files, found: {error}; download "
            f"the model again, or {FRESH}"
        ) from None


def config_in(folder: Path) -> Path:
    """The config of a folder."""
    if not (folder / CONFIG).is_file():
        names = sorted(each.name for each in folder.iterdir())
        found = f"{', '.join(names[:3])}{', ...' if names[3:] else ''}" if names else "an empty folder"
        raise SettingsError(
            f"--model {folder}: expected a Hugging Face {CONFIG} there, found {found}; give the folder of a "
            "model"
        )
    return folder / CONFIG


def read_config(file: Path) -> dict[str, Any]:
    """The values of a ``config.json``."""
    try:
        described = json.loads(file.read_text())
    except OSError as error:
        raise SettingsError(f"--model {file}: {error.strerror or error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--model {file}: expected JSON, found: {error}") from error
    if not isinstance(described, dict) or "model_type" not in described:
        raise SettingsError(
            f"--model {file}: expected a Hugging Face config with model_type, found "
            f"{sorted(described) if isinstance(described, dict) else type(described).__name__}"
        )
    return described


def as_config(described: dict[str, Any], file: Path) -> Any:
    """What transformers make of the values of a config."""
    require("transformers", f"--model {file}")
    import transformers

    try:
        return transformers.AutoConfig.for_model(**described)
    except Exception as error:
        raise SettingsError(f"--model {file}: transformers cannot read it: {error}") from error


def objective_of(config: Any) -> Objective | None:
    """What a model of this config predicts; None: no tokens of its own input."""
    if getattr(config, "is_encoder_decoder", False):
        return None
    causal, masked = _class_names("causal"), _class_names("masked")
    for name in getattr(config, "architectures", None) or ():
        if name in masked.values():
            return "masked"
        if name in causal.values():
            return "causal"
    if config.model_type in masked and not getattr(config, "is_decoder", False):
        return "masked"
    return "causal" if config.model_type in causal else None


def check_objective(config: Any, objective: Objective, file: Path) -> None:
    """Raise if transformers have no model of this config for the objective."""
    if getattr(config, "is_encoder_decoder", False) or config.model_type not in _class_names(objective):
        raise SettingsError(
            f"model.objective: expected one that {_AUTO[objective]} has for {config.model_type!r} ({file}), "
            f"found {objective!r}; leave it out"
        )


def let_see(config: Any, objective: Objective) -> None:
    """Have the config say which tokens each token sees, in kinds that have models of both objectives.

    There the class does not decide it: a ``BertLMHeadModel`` sees the tokens that it is to predict, unless
    the config says that it is a decoder.
    """
    flag = "causal" if config.model_type == "xlm" else "is_decoder"
    both = _class_names("causal").keys() & _class_names("masked").keys()
    if config.model_type in both | {"bert-generation"}:
        setattr(config, flag, objective == "causal")


def refuse_kind(title: str) -> SettingsError:
    """The error for a model that predicts no tokens of its own input."""
    return SettingsError(
        f"--model {title}: expected a causal or a masked language model of transformers "
        f"({_SHOWN}), found another kind; mics.shard trains it in a loop of your own"
    )


def is_masked_class(name: str) -> bool:
    """Whether a class of transformers predicts masked tokens. They are not imported for it."""
    return name.endswith("ForMaskedLM")


def make_model(config: Any, objective: Objective | None, file: Path) -> nn.Module:
    """The model of a config on torch's default device; transformers choose the attention (sdpa if any)."""
    import transformers

    names = [_AUTO[objective]] if objective else ["AutoModelForSeq2SeqLM", "AutoModel"]
    kinds: list[Any] = [getattr(transformers, name) for name in names]
    kind = next((kind for kind in kinds if type(config) in kind._model_mapping), kinds[-1])
    try:
        model: nn.Module = kind.from_config(copy.deepcopy(config))
    except Exception as error:
        raise SettingsError(f"--model {file}: transformers cannot build it: {error}") from error
    return model


def _class_names(objective: Objective) -> dict[str, str]:
    """Names of classes by model type."""
    from transformers.models.auto import modeling_auto

    if objective == "causal":
        names = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        return {kind: name for kind, name in names.items() if kind not in _NOT_CAUSAL}
    return dict(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
