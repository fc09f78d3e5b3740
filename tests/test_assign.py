"""Which parameters make up which unit."""

from __future__ import annotations

import pytest
import torch.nn as nn

from mics.errors import SettingsError
from mics.layout.assign import assign_sites


class Block(nn.Module):
    """Two layers and a list of adapters that must not become units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.adapters = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


class Net(nn.Module):
    """Embedding, blocks, norm, head, and a parameter of the root itself."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 3)
        self.scale = nn.Parameter(self.norm.weight.detach().clone())
        if tied:
            self.head.weight = self.embed.weight


def _names(model: nn.Module, **kwargs: object) -> dict[str, list[str]]:
    return {site.name: [ref.name for ref in site.params] for site in assign_sites(model, **kwargs)}


def test_blocks_and_leftovers() -> None:
    """Blocks are units; what is left over goes to the largest modules that hold no block."""
    sites = _names(Net())
    assert set(sites) == {"", "embed", "blocks.0", "blocks.1", "norm", "head"}
    assert sites[""] == ["scale"]
    assert len(sites["blocks.0"]) == 6


def test_every_parameter_has_one_site() -> None:
    """No parameter is lost or given twice, tied or not."""
    for tied in (False, True):
        model = Net(tied=tied)
        given = [name for names in _names(model).values() for name in names]
        assert sorted(given) == sorted(name for name, _ in model.named_parameters())


def test_tied_weights_belong_to_the_module_around_both() -> None:
    """A weight of the embedding and the head is gathered for the root."""
    sites = assign_sites(Net(tied=True))
    root = next(site for site in sites if site.name == "")
    tied = next(ref for ref in root.params if ref.name == "embed.weight")
    assert len(tied.places) == 2


def test_one_block_used_several_times_is_one_site() -> None:
    """Shared modules (the same object in a list twice) are followed by identity, not by name."""
    block = Block()
    model = nn.Sequential(block, block, Block())
    assert set(_names(model)) == {"0", "2"}


def test_units_by_class_and_by_module_may_nest() -> None:
    """The innermost unit around a parameter owns it."""
    model = Net()
    sites = _names(model, units=[Block, model.blocks[0].inner])
    assert sites["blocks.0.inner"] == ["blocks.0.inner.weight", "blocks.0.inner.bias"]
    assert "blocks.0.inner.weight" not in sites["blocks.0"]


def test_a_model_without_blocks_is_one_unit() -> None:
    """Nothing repeats: everything belongs to the root."""
    assert list(_names(Block().inner)) == [""]


@pytest.mark.parametrize("unit", [nn.Linear(1, 1), nn.Conv2d, "blocks"])
def test_units_outside_the_model_are_refused(unit: object) -> None:
    """Foreign modules, classes without an instance, and names are errors."""
    with pytest.raises(SettingsError, match="units: expected"):
        assign_sites(Net(), [unit])  # type: ignore[list-item]


def test_weights_tied_across_a_list_alone_are_refused() -> None:
    """Nobody calls a list, so nothing would gather them."""
    blocks = nn.ModuleList([Block(), Block()])
    blocks[1].inner.weight = blocks[0].inner.weight
    with pytest.raises(SettingsError, match=r"0\.inner\.weight: expected .* found a ModuleList"):
        assign_sites(blocks)
