"""FSDP2 trainings that save and load with torch.distributed.checkpoint alone, run as ranks by the tests."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from tests import toys
from tests.checkpoint.runs import STEPS, build, everything, train


def build_fsdp(*, seed: int = 0, model: str = "Language") -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    plain = getattr(toys, model)()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in getattr(plain, "blocks", []):
        fully_shard(block, mesh=mesh)
    fully_shard(plain, mesh=mesh)
    groups = [
        {"params": [p for p in plain.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in plain.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 2e-3},
    ]
    return plain, torch.optim.AdamW(groups, lr=1e-3)


def train_fsdp(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        model(*toys.language_batch(step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def everything_fsdp(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All parameters and optimizer state, whole: what ``everything`` gives of a model of mics."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # With cpu_offload only the first rank has them; the others are told.
    found: list[Any] = [get_state_dict(model, optimizer, options=options)]
    dist.broadcast_object_list(found)
    parameters, state = found[0]
    return {
        "model": parameters,
        "optimizer": state["state"],
        "lr": [group["lr"] for group in optimizer.param_groups],
    }


class AppState:
    """The recipe of torch's tutorial: one object that has both."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )


def state_in_form(form: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What users of FSDP2 give to dcp.save and dcp.load."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

    if form == "app":
        return {"app": AppState(model, optimizer)}
    if form == "bare":
        return dict(get_model_state_dict(model))
    options = StateDictOptions(flatten_optimizer_state_dict=form in ("flat", "titan"))
    parameters, state = get_state_dict(model, optimizer, options=options)
    if form == "titan":  # the model's names stand at the top, beside the optimizer
        return {**parameters, "optimizer": state, "train_state": {"step": torch.tensor(STEPS)}}
    return {"model": parameters, ("optim" if form == "flat" else "optimizer"): state}


FORMS = ("nested", "flat", "app", "titan", "bare")


def saved_by_fsdp(root: str) -> dict[str, Any]:
    """One training, saved in all forms."""
    import torch.distributed.checkpoint as dcp

    model, optimizer = build_fsdp()
    train_fsdp(model, optimizer)
    for form in FORMS:
        dcp.save(state_in_form(form, model, optimizer), checkpoint_id=f"{root}/{form}")
    return everything_fsdp(model, optimizer)


@contextmanager
def no_pickles() -> Any:
    """Whatever would load a pickle raises. Collectives of objects unpickle too, and are let through."""
    import pickle

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a pickle was loaded")

    class Unpickler(pickle.Unpickler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("a pickle was loaded")

    with (
        patch("torch.load", refuse),
        patch("pickle.load", refuse),
        patch("pickle.loads", refuse),
        patch("pickle.Unpickler", Unpickler),
    ):
        yield


def loaded_from_stock(root: str, forms: list[str], partition_size: int) -> dict[str, dict[str, Any]]:
    """Each form loaded into a model of mics that trained on something else before."""
    import mics

    found = {}
    for form in forms:
        model, optimizer = build(partition_size, seed=1)
        train(model, optimizer, 0, 1)
        with no_pickles():
            mics.load(f"{root}/{form}", model, None if form == "bare" else optimizer)
        found[form] = everything(model, optimizer)
        train(model, optimizer, STEPS, STEPS + 1)
    return found


def loaded_by_stock(path: str, form: str) -> dict[str, Any]:
    """A checkpoint of mics, read by ``dcp.load`` into FSDP2."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    model, optimizer = build_fsdp(seed=1)
    parts = state_in_form(form, model, optimizer)
    state = {"model": parts["model"], "optimizer": parts.get("optimizer", parts.get("optim"))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return everything_fsdp(model, optimizer)
