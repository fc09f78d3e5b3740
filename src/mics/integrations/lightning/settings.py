"""What both strategies are given: settings of ``mics.shard``, a precision, a kind of checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, get_args

import torch
from torch import nn

from mics.engine import engine_of, is_sharded
from mics.errors import SettingsError
from mics.integrations.config import MicsConfig
from mics.layout.precision import Precision

StateDictType = Literal["full", "sharded"]

_SETTINGS: Final = frozenset(field.name for field in fields(MicsConfig))
_PARAM_DTYPES: Final = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-true": torch.bfloat16,
}
"""What modules compute with under each precision of Lightning's. Masters are float32 in all of them."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The arguments of a strategy, named ``owner`` in errors."""

    owner: str
    settings: Mapping[str, Any]
    state_dict_type: StateDictType
    config: MicsConfig = field(init=False)

    def __post_init__(self) -> None:
        unknown = sorted(self.settings.keys() - _SETTINGS)
        if unknown:
            raise SettingsError(
                f"{self.owner}: expected settings of mics.shard ({', '.join(sorted(_SETTINGS))}), found "
                f"{', '.join(unknown)}"
            )
        given = self.settings.get("precision")
        if given is not None and not isinstance(given, Precision):
            raise SettingsError(
                f"{self.owner}(precision=...): expected a mics.Precision, found {given!r}; give a name such "
                "as 'bf16-mixed' to the Trainer or to Fabric"
            )
        object.__setattr__(self, "config", MicsConfig(**self.settings))
        if self.state_dict_type not in get_args(StateDictType):
            raise SettingsError(
                f"{self.owner}(state_dict_type=...): expected 'full' or 'sharded', found "
                f"{self.state_dict_type!r}"
            )

    def check_precision(self, plugin: Any, supported: tuple[type, ...]) -> None:
        """Raise if mics does not train with this precision plugin, or if another precision was given too."""
        name = plugin.precision
        if not (type(plugin) in supported and name in _PARAM_DTYPES):
            raise SettingsError(
                f"precision: expected one of {', '.join(map(repr, _PARAM_DTYPES))} with {self.owner}, found "
                f"{name!r} ({type(plugin).__name__})"
            )
        if self.config.precision is not None and name != "32-true":
            raise SettingsError(
                f"precision: expected it once, found precision={name!r} and "
                f"{self.owner}(precision={self.config.precision}); leave one out"
            )

    def shard(self, model: nn.Module, precision: str, device: torch.device) -> None:
        """Shard ``model`` unless it is sharded already, by ``configure_model`` or an earlier run."""
        if not is_sharded(model):
            self.config.shard(model, param_dtype=_PARAM_DTYPES[precision])
        found = engine_of(model).device
        if found != device:
            raise SettingsError(
                f"{self.owner}: expected the model on {device}, found its shards on {found}; let "
                "Lightning make the process group, or move the model before"
            )
