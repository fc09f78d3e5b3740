"""Methods other than ``forward`` that compute with a model's parameters: followed like a forward."""

from __future__ import annotations

import inspect
from functools import partial, update_wrapper
from typing import Any

import torch.nn as nn

from mics.errors import SettingsError
from mics.schedule.autograd import Autograd
from mics.schedule.sites import ScheduledSite

# What authors call such methods. Others may do what must not happen in a forward: build an optimizer, step.
_PREFIXES = ("forward_", "encode", "decode", "embed", "extract_")
_NAMES = frozenset(
    {
        "loss",
        "compute_loss",
        "get_audio_features",
        "get_image_features",
        "get_text_features",
        "get_video_features",
    }
)


def follow_usual_methods(autograd: Autograd) -> None:
    """Follow the methods of all sites that are named as such methods usually are."""
    for site in list(autograd.sites):
        kind = type(site.module)
        if not kind.__module__.startswith("torch."):
            for name in dir(kind):
                if (name.startswith(_PREFIXES) or name in _NAMES) and _is_method(site.module, name):
                    _follow(autograd, site, name)


def follow_method(autograd: Autograd, model: nn.Module, path: str) -> None:
    """Follow the method at the end of a dotted ``path`` from the model."""
    if not isinstance(path, str):
        raise SettingsError(f"register_forward_method: expected the name of a method, found {path!r}")
    prefix, _, name = path.rpartition(".")
    module = dict(model.named_modules()).get(prefix)
    if module is not None and _is_followed(module, name):
        return
    if module is None or not _is_method(module, name):
        found = "no module" if module is None else f"none in {type(module).__name__}"
        raise SettingsError(
            f"register_forward_method: expected a method of the model, or of a submodule by its path, such "
            f"as 'encoder.embed'; found {found} for {path!r}"
        )
    site = next((site for site in autograd.sites if site.module is module), None)
    if site is None:
        site = ScheduledSite(name=prefix, module=module, units=[])
        autograd.sites.append(site)
    _follow(autograd, site, name)


def _is_method(module: nn.Module, name: str) -> bool:
    found = module.__dict__.get(name, inspect.getattr_static(type(module), name, None))
    is_module_own = name in nn.Module.__dict__ or name == "forward"  # forward has its hooks
    suspends = inspect.isgeneratorfunction(found) or inspect.iscoroutinefunction(found)
    return inspect.isroutine(found) and not is_module_own and not suspends


def _is_followed(module: nn.Module, name: str) -> bool:
    found = module.__dict__.get(name)
    return isinstance(found, partial) and found.func is _run


def _follow(autograd: Autograd, site: ScheduledSite, name: str) -> None:
    method = getattr(site.module, name)
    site.module.__dict__[name] = update_wrapper(partial(_run, autograd, site, method), method)


def _run(autograd: Autograd, site: ScheduledSite, method: Any, /, *args: Any, **kwargs: Any) -> Any:
    if site.depth:  # a forward of this module is around it
        return method(*args, **kwargs)
    args, kwargs = autograd.pre_forward(site, site.module, args, kwargs) or (args, kwargs)
    output = None
    try:
        output = method(*args, **kwargs)
    finally:
        replaced = autograd.post_forward(site, site.module, args, kwargs, output)
    return output if replaced is None else replaced
