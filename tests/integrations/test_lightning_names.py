"""Every private name of Lightning's that the strategies use is there, and calls them as they expect."""

from __future__ import annotations

import inspect
from importlib import import_module

import lightning

# What src/mics/integrations/lightning/ imports, calls or overrides although it is private.
PRIVATE = {
    "imports": [
        "lightning.fabric.strategies.strategy._BackwardSyncControl",
        "lightning.fabric.utilities.device_dtype_mixin._update_properties",
    ],
    "calls": [
        "lightning.fabric.strategies.strategy.Strategy._convert_stateful_objects_in_state",
        "lightning.pytorch.strategies.strategy.Strategy._reset_optimizers_and_schedulers",
    ],
}
# Attributes that constructors set: (class, name).
ATTRIBUTES = [
    ("lightning.pytorch.strategies.strategy.Strategy", "_precision_plugin"),
    ("lightning.pytorch.strategies.parallel.ParallelStrategy", "_layer_sync"),
    ("lightning.fabric.strategies.strategy.Strategy", "_precision"),
    ("lightning.fabric.strategies.strategy.Strategy", "_backward_sync_control"),
]
# Public methods and properties that are overridden: another name would leave them uncalled.
OVERRIDDEN = {
    "lightning.pytorch.strategies.DDPStrategy": [
        "block_backward_sync",
        "lightning_module_state_dict",
        "load_checkpoint",
        "load_model_state_dict",
        "load_optimizer_state_dict",
        "model_to_device",
        "optimizer_state",
        "optimizer_step",
        "precision_plugin",
        "restore_checkpoint_after_setup",
        "save_checkpoint",
        "setup",
        "teardown",
        "tensor_init_context",
    ],
    "lightning.fabric.strategies.ddp.DDPStrategy": [
        "get_module_state_dict",
        "get_optimizer_state",
        "load_checkpoint",
        "load_module_state_dict",
        "module_init_context",
        "module_to_device",
        "precision",
        "save_checkpoint",
        "setup_module",
        "setup_module_and_optimizers",
    ],
}
# Where Lightning calls what the strategies rely on to be called: (function, text of its source).
CALLERS = [
    ("lightning.pytorch.loops.utilities._block_parallel_sync_behavior", "strategy.block_backward_sync()"),
    ("lightning.fabric.fabric.Fabric.no_backward_sync", "_backward_sync_control.no_backward_sync("),
    ("lightning.fabric.wrappers._unwrap_objects", "._forward_module"),
]


def _found(path: str) -> object | None:
    parts = path.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for part in parts[split:]:
            found = getattr(found, part, None)
        return found
    return None


def _missing() -> list[str]:
    missing = [f"{use} {path}" for use, paths in PRIVATE.items() for path in paths if _found(path) is None]
    for path, names in OVERRIDDEN.items():
        missing += [f"overrides {path}.{name}" for name in names if not hasattr(_found(path), name)]
    for path, name in ATTRIBUTES:
        if f"self.{name}" not in inspect.getsource(_found(path)):  # type: ignore[arg-type]
            missing.append(f"sets {path}().{name}")
    for path, text in CALLERS:
        caller = _found(path)
        if caller is None or text not in inspect.getsource(caller):  # type: ignore[arg-type]
            missing.append(f"relies on {text!r} in {path}")
    return missing


def test_every_name_of_lightning_is_there() -> None:
    missing = _missing()
    assert not missing, f"lightning {lightning.__version__} lacks:\n" + "\n".join(missing)


def test_what_is_overridden_is_listed() -> None:
    """The list above has every method and property that the strategies override."""
    from mics.integrations.lightning import MicsFabricStrategy, MicsStrategy

    for kind, path in zip((MicsStrategy, MicsFabricStrategy), OVERRIDDEN, strict=True):
        base = kind.__mro__[1]
        own = {name for name in vars(kind) if hasattr(base, name) and not name.startswith("__")}
        assert own - {"_abc_impl"} == set(OVERRIDDEN[path])


def test_a_missing_name_is_seen() -> None:
    assert _found("lightning.pytorch.Trainer.fit") is not None
    assert _found("lightning.pytorch.Trainer._no_such_name") is None
