"""What the user's modules hold of a unit: its shards, or its whole parameters while it is gathered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch.nn as nn

from mics.errors import MicsError
from mics.sharding.spec import UnitSpec
from mics.utils.structure import WatchedTable

if TYPE_CHECKING:
    from mics.sharding.unit import Unit


class ParameterTable(WatchedTable[nn.Parameter | None]):
    """A module's ``_parameters``. Reading a parameter of a unit that is not gathered is told before.

    Modules may use a weight without calling the module that holds it (``x @ self.embed.weight.T``): no
    hook sees that, and a parameter that is not gathered has no memory behind it.
    """

    def __init__(self, params: dict[str, nn.Parameter | None]) -> None:
        super().__init__(params)
        self.units: dict[str, Unit] = {}

    def __getitem__(self, name: str) -> nn.Parameter | None:
        unit = self.units.get(name)
        if unit is not None and not unit.gathered:
            for hear in unit.held.read_listeners:
                hear()
        return super().__getitem__(name)

    @staticmethod
    def holds_units(module: nn.Module) -> bool:
        """Whether parameters of ``module`` are sharded."""
        return isinstance(module._parameters, ParameterTable) and bool(module._parameters.units)

    @staticmethod
    def of(module: nn.Module) -> ParameterTable:
        """The table of ``module``, which has it from now on."""
        table = module._parameters
        if not isinstance(table, ParameterTable):
            table = module.__dict__["_parameters"] = ParameterTable(table)
        return table


class HeldParameters:
    """The places in the user's modules where the parameters of one unit are."""

    def __init__(self, spec: UnitSpec, unit: Unit) -> None:
        self.read_listeners: list[Callable[[], None]] = []
        self._spec = spec
        self._entries: list[tuple[ParameterTable, str, int]] = []
        for index, found in enumerate(spec.refs):
            for module, attribute in found.places:
                table = ParameterTable.of(module)
                table.units[attribute] = unit
                self._entries.append((table, attribute, index))
        self.copies: Sequence[nn.Parameter] = ()
        self._rnns = {id(m): m for found in spec.refs for m, _ in found.places if isinstance(m, nn.RNNBase)}
        for rnn in self._rnns.values():
            # cuDNN would move the weights to a buffer of its own, away from the unit's.
            rnn.flatten_parameters = lambda: None  # type: ignore[method-assign]

    def show(self, params: Sequence[nn.Parameter]) -> None:
        """Let the modules hold ``params``."""
        for table, attribute, index in self._entries:
            dict.__setitem__(table, attribute, params[index])
        for rnn in self._rnns.values():
            # torch's recurrent modules keep a second list of their weights, and compute with that one.
            rnn._flat_weights = [dict.get(rnn._parameters, name) for name in rnn._flat_weights_names]

    def show_copies(self, copies: Sequence[nn.Parameter]) -> None:
        """Let the modules hold copies, until somebody computes with the unit or changes its values."""
        self.copies = copies
        self.show(copies)

    def drop_copies(self, params: Sequence[nn.Parameter]) -> None:
        """Let the modules hold ``params`` again instead of copies. Raises if one was written to."""
        if not self.copies:
            return
        copies, self.copies = self.copies, ()
        self.show(params)
        for found, copy in zip(self._spec.refs, copies, strict=True):
            if copy._version:
                raise MicsError(
                    f"{found.name}: expected an unsharded parameter to be read, found it written to; the "
                    "change would be lost, make it in mics.summon_full_params(model, write=True)"
                )

    def check(self, params: Sequence[nn.Parameter]) -> None:
        """Raise if a module was given another parameter in place of one of ``params``."""
        self.drop_copies(params)
        for table, attribute, index in self._entries:
            if dict.get(table, attribute) is not params[index]:
                raise MicsError(
                    f"{self._spec.refs[index].name}: expected the parameter that mics.shard() put there, "
                    "found another; replace parameters before sharding, or write to them in "
                    "mics.summon_full_params(model, write=True)"
                )

    def outside(self, tables: Collection[int]) -> list[int]:
        """Which parameters none of the modules with these tables, by their ids, holds."""
        inside = {index for table, _, index in self._entries if id(table) in tables}
        return [index for index in range(len(self._spec.refs)) if index not in inside]
