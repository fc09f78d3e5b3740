"""Methods other than ``forward`` that compute with a model's parameters: followed like a forward."""

from __future__ import annotations

import inspect
from functools import partial, update_wrapper
from typing import Any

import torch.nn as nn

from mics.errors import SettingsError
from mics.schedule import Schedule
from mics.scheduled_site import ScheduledSite

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


def follow_usual_methods(schedule: Schedule) -> None:
    """Follow the methods of all sites that are named as such methods usually are."""
    for site in list(schedule.sites):
        kind = type(site.module)
        if not kind.__module__.startswith("torch."):
            for name in dir(kind):
                if (name.startswith(_PREFIXES) or name in _NAMES) and _is_method(site.module, name):
                    _follow(schedule, site, name)


def follow_method(schedule: Schedule, model: nn.Module, path: str) -> None:
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
    site = next((site for site in schedule.sites if site.module is module), None)
    if site is None:
        site = ScheduledSite(name=prefix, module=module, units=[])
        schedule.sites.append(site)
    _follow(schedule, site, name)


def _is_method(module: nn.Module, name: str) -> bool:
    found = module.__dict__.get(name, inspect.getattr_static(type(module), name, None))
    is_module_own = name in nn.Module.__dict__ or name == "forward"  # forward has its hooks
    suspends = inspect.isgeneratorfunction(found) or inspect.iscoroutinefunction(found)
    return inspect.isroutine(found) and not is_module_own and not suspends


def _is_followed(module: nn.Module, name: str) -> bool:
    found = module.__dict__.get(name)
    return isinstance(found, partial) and found.func is _run


def _follow(schedule: Schedule, site: ScheduledSite, name: str) -> None:
    method = getattr(site.module, name)
    site.module.__dict__[name] = update_wrapper(partial(_run, schedule, site, method), method)


def _run(schedule: Schedule, site: ScheduledSite, method: Any, /, *args: Any, **kwargs: Any) -> Any:
    if site.depth:  # a forward of this module is around it
        return method(*args, **kwargs)
    args, kwargs = schedule.pre_forward(site, site.module, args, kwargs) or (args, kwargs)
    output = None
    try:
        output = method(*args, **kwargs)
    finally:
        replaced = schedule.post_forward(site, site.module, args, kwargs, output)
    return output if replaced is None else replaced
