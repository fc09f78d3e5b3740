"""Every name of torch's that the sources use is there: a torch that lacks some fails here, with all of them.

The names are read from the sources, so that the list cannot go stale. A dotted name or an import is looked up
as it stands. An attribute of an object (``param._backward_hooks``) has no type in the source: a private one
that no class of ours has must be found on one of the `holders`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "benchmarks")

# Private names that classes of ours have and objects of torch's too: looked up as torch's.
IN_BOTH = {
    "_apply",
    "_buffers",
    "_device_types",
    "_get_backend",
    "_make",
    "_modules",
    "_timeout",
    "_version",
}

Places = dict[str, set[str]]  # name -> files that use it


class _Pair(NamedTuple):
    first: int


def _holders() -> list[Any]:
    """Objects whose private attributes the sources read."""
    import accelerate
    import fsspec
    import transformers
    from lightning.fabric.strategies.ddp import DDPStrategy as FabricStrategy
    from lightning.pytorch.strategies import DDPStrategy

    found: list[Any] = [
        os,
        sys,
        threading,
        _Pair,
        torch.ops.aten.add.Tensor,
        torch.Tensor,
        nn.Module(),
        nn.LSTM(1, 1),
        torch.UntypedStorage,
    ]
    found += [torch.optim.SGD([nn.Parameter(torch.zeros(1))]), torch.amp.GradScaler("cpu")]
    # Of other hosts, which few have installed: tests/integrations/test_private_names.py looks for them.
    titan = ("_param_init", "_init_self_parameters", "_init_self_buffers", "_build_llama3_layers")
    verl = ("_build_model_optimizer", "_current_platform")
    trl = ("_dist", "_fix_param_name_to_vllm", "_compute_loss")
    trainer = ("_loss_shifts_labels",)  # which its constructor sets
    torchao = ("_linear_mm_config",)
    found += [SimpleNamespace(**dict.fromkeys((*titan, *verl, *trl, *trainer, *torchao)))]
    found += [DDPStrategy, FabricStrategy, SimpleNamespace(_layer_sync=DDPStrategy()._layer_sync)]
    found += [dist.ProcessGroup, dist.Work, dist.Backend, dist.ProcessGroupGloo]
    found += [dist.ProcessGroupGloo._Options]
    found += [transformers.PreTrainedModel, transformers.AutoModel, accelerate.state.AcceleratorState]
    return [*found, fsspec.AbstractFileSystem]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


class _Sources:
    """What the sources define and what they use."""

    def __init__(self) -> None:
        self.ours: set[str] = set()
        self.dotted: Places = defaultdict(set)  # from the top: "torch.nn.Module"
        self.attributes: Places = defaultdict(set)  # of anything but self
        self.own_attributes: Places = defaultdict(set)  # of self: ours, or a base class's
        for folder in FOLDERS:
            for file in sorted((ROOT / folder).rglob("*.py")):
                self._read(str(file.relative_to(ROOT)), ast.parse(file.read_text()))

    def _read(self, file: str, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        bound: dict[str, str] = {}  # a name in this file -> what of torch it is
        for node in nodes:
            self.ours.update(_defined(node))
            for name, path in _imported(node):
                bound[name] = path
                self.dotted[path].add(file)
        for node in nodes:
            if not isinstance(node, ast.Attribute):
                continue
            head, *rest = _chain(node)
            if head in bound:
                self.dotted[".".join([bound[head], *rest])].add(file)
            elif _is_private(node.attr):
                own = head in ("self", "cls") and len(rest) == 1
                (self.own_attributes if own else self.attributes)[node.attr].add(file)


@cache
def _sources() -> _Sources:
    return _Sources()


def _defined(node: ast.AST) -> Iterator[str]:
    """Names that this piece of a source brings into being."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif (
        isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _chain(node)[:-1] == ["self"]
    ):
        yield node.attr


def _chain(node: ast.expr) -> list[str]:
    """``a.b.c`` as its parts; the first is empty where it is no name."""
    if isinstance(node, ast.Attribute):
        return [*_chain(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(name in the file, dotted path) of what this statement imports from torch."""
    if isinstance(node, ast.Import):
        for each in node.names:
            if each.name.split(".")[0] == "torch":
                yield each.asname or "torch", each.name if each.asname else "torch"
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
        for each in node.names:
            yield each.asname or each.name, f"{node.module}.{each.name}"


def _is_there(path: str) -> bool:
    """Whether the path leads somewhere. Behind an object that is no module and no class nothing is known."""
    found: Any = importlib.import_module("torch")
    known = "torch"
    for part in path.split(".")[1:]:
        if not (inspect.ismodule(found) or inspect.isclass(found)):
            return True
        known += f".{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(known)
            except ImportError:
                return False
    return True


def _told(names: Places) -> str:
    return "\n".join(f"  {name}  ({', '.join(sorted(names[name]))})" for name in sorted(names))


@pytest.mark.full
def test_every_name_of_torch_is_there() -> None:
    """Imports, dotted names and private attributes that src/, tests/ and benchmarks/ use, all at once."""
    sources, holders = _sources(), _holders()
    missing = {path: files for path, files in sources.dotted.items() if not _is_there(path)}
    for used in (sources.attributes, sources.own_attributes):
        missing |= {
            name: files
            for name, files in used.items()
            if (name not in sources.ours or (name in IN_BOTH and used is sources.attributes))
            and not any(hasattr(holder, name) for holder in holders)
        }
    assert not missing, f"torch {torch.__version__} lacks names that the sources use:\n{_told(missing)}"


def test_names_that_torch_shares_with_us_are_known() -> None:
    """A private attribute of torch's is not overlooked because a class of ours has one of the same name."""
    sources, holders = _sources(), _holders()
    shared = {
        name: files
        for name, files in sources.attributes.items()
        if name in sources.ours and any(hasattr(holder, name) for holder in holders)
    }
    unknown = {name: shared[name] for name in shared.keys() - IN_BOTH}
    assert not unknown, (
        f"add to IN_BOTH what torch's objects and classes of ours both have:\n{_told(unknown)}"
    )


def test_a_missing_name_is_seen() -> None:
    """The look-up finds what is there and nothing else, also in modules that are not imported yet."""
    assert _is_there("torch.distributed.checkpoint.filesystem.FileSystemWriter")
    assert _is_there("torch.Tensor._version")
    assert not _is_there("torch._C._no_such_name")
    assert not _is_there("torch.no_such_module.name")
    assert "torch._foreach_norm" in _sources().dotted
    assert "_backward_hooks" in _sources().attributes
