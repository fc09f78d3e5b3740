"""One unit: its shard and its gathered parameters.

Tensors of a unit of ``numel`` elements (padding included) on one rank, with p chunks and R pieces::

    param_shard  [numel/p]          param format     this rank's chunk; what gathers read (``master`` itself
                                                     where they cast it on the way)
    master       [numel/p/R]        master format    what the optimizer updates ([numel/p] if it is not
                                                     sharded over replicas); the very memory of
                                                     ``param_shard`` where the formats agree
    gradients    [numel/p]          float32          hop 1 adds every micro-step to it
    flat         [numel]            param format     the gathered parameters; at its home in the arena, or in
                                                     memory of its own that comes and goes
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.nn as nn
from torch import Tensor

from mics.comm.journal import in_call
from mics.comm.lanes import DONE, Ticket
from mics.comm.world import MeshCollectives
from mics.contiguous import Contiguous
from mics.errors import UNCOPYABLE, MicsError, SettingsError
from mics.gathered import GatheredMemory
from mics.guard import ShardOwner, ShardParameter, plainly
from mics.structure import WatchedTable
from mics.unit_gradients import UnitGradients
from mics.unit_spec import Share, UnitSpec, label_of


class ParameterTable(WatchedTable[nn.Parameter | None]):
    """A module's ``_parameters``. Reading a parameter of a released unit first asks the schedule.

    Modules may use a weight without calling the module that holds it (``x @ self.embed.weight.T``): no
    hook sees that, and a released parameter has no memory behind it.
    """

    def __init__(self, params: dict[str, nn.Parameter | None]) -> None:
        super().__init__(params)
        self.units: dict[str, Unit] = {}

    def __getitem__(self, name: str) -> nn.Parameter | None:
        unit = self.units.get(name)
        if unit is not None and not unit.gathered:
            unit.on_access(unit)
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


class UnitMemory:
    """The memory of all units of a model on one rank: a buffer for each purpose."""

    def __init__(self, specs: Sequence[UnitSpec], share: Share, device: torch.device) -> None:
        self.device = device
        params, masters, gradients = Contiguous(device), Contiguous(device), Contiguous(device)
        self.gradients = gradients
        self.param_parts = {
            spec.index: params.reserve(spec.param_dtype, spec.layout.chunk_numel)
            for spec in specs
            if not spec.casts_masters
        }
        self.master_parts = {
            spec.index: masters.reserve(spec.master_dtype, share.master_numel(spec))
            for spec in specs
            if spec.has_masters
        }
        self.gradient_parts = {
            spec.index: gradients.reserve(spec.grad_dtype, spec.layout.chunk_numel)
            for spec in specs
            if spec.trainable
        }


class Unit:
    """The parameters that are gathered and released together."""

    def __init__(
        self,
        spec: UnitSpec,
        share: Share,
        *,
        mesh: MeshCollectives,
        memory: UnitMemory,
        owner: ShardOwner,
    ) -> None:
        self.spec = spec
        self.share = share
        self.device = memory.device
        self.gathered = False
        self._neighbours: list[Unit] = []  # whose homes overlap this one's
        self.on_access: Callable[[Unit], None] = lambda unit: None  # set by the schedule
        self._mesh = mesh
        self._versions = 0
        self.num_refreshes = 0
        # Lanes work on these beside the computation; whoever touches the memory waits for its ticket.
        self._arriving: Ticket | None = None  # a gather that is under way, for ``flat``
        self._gather_read: Ticket = DONE  # the last gather, for ``param_shard``
        self._refreshed: Ticket = DONE  # for ``param_shard``

        if spec.casts_masters:
            self.master = self.param_shard = self._own_params = memory.master_parts[spec.index].tensor()
        else:
            self.param_shard = memory.param_parts[spec.index].tensor()
            self._own_params = share.own_of(spec, self.param_shard)  # what ``master`` is the master of
            self.master = memory.master_parts[spec.index].tensor() if spec.has_masters else self._own_params
        # The same memory with a version counter of its own: what lanes write to it is nobody's edit.
        self._incoming = self.param_shard.data
        self.layouts = share.layouts_of(spec)  # which elements each of ``shards`` holds
        self.shards: list[ShardParameter] = [
            ShardParameter.of(view, layout, ref(owner), trainable=spec.trainable)
            for view, layout in zip(self.views_of(self.master), self.layouts, strict=True)
        ]
        alone = mesh.gather.size == 1
        self.memory = GatheredMemory(
            spec.layout, spec.param_dtype, self.device, whole=self.param_shard if alone else None
        )
        self.full = [nn.Parameter(view, requires_grad=spec.trainable) for view in self.memory.views()]
        self.memory.release()
        self.gradients = UnitGradients(
            spec,
            share,
            mesh=mesh,
            full=self.full,
            shards=self.shards,
            memory=memory.gradient_parts.get(spec.index),
        )
        self._entries = self._install()
        self._writes_are_lost = not (alone and self.master is self.param_shard and mesh.replication.size == 1)
        self._rnns = {id(m): m for held in spec.refs for m, _ in held.places if isinstance(m, nn.RNNBase)}
        for rnn in self._rnns.values():
            # cuDNN would move the weights to a buffer of its own, away from ``flat``.
            rnn.flatten_parameters = lambda: None  # type: ignore[method-assign]
        for old, shard, full in zip(spec.refs, self.shards, self.full, strict=True):
            # Marks that users hang on parameters, such as "no weight decay".
            shard.__dict__.update(old.param.__dict__)
            full.__dict__.update(old.param.__dict__)
        self.expose(self.shards)

    # -- parameters ---------------------------------------------------------------------------------

    @property
    def flat(self) -> Tensor:
        """The gathered parameters: [numel]."""
        return self.memory.flat

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, which has memory, is part of the gathered parameters."""
        return tensor.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr()

    @property
    def is_arriving(self) -> bool:
        """Whether it has been sent for and not been used yet."""
        return self._arriving is not None

    def gather(self) -> None:
        """Make the full parameters what the modules hold."""
        if self.gathered:
            return
        if self._arriving is not None and self.masters_changed():
            self.release()  # what is on its way is out of date
        send_for([self])
        assert self._arriving is not None, "its home is taken"
        self._arriving.wait()
        self._arriving = None
        self._check_held()
        with plainly():
            for shard, full in zip(self.shards, self.full, strict=True):
                if shard.requires_grad != full.requires_grad:
                    self._follow_requires_grad(shard, full)
        self.gathered = True
        self.expose(self.full)

    def release(self) -> None:
        """Give the gathered memory back; modules hold shards again."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
            self.memory.release()
        if not self.gathered:
            return
        self.keep()
        self._arriving = None
        self.memory.release()

    def keep(self) -> None:
        """Let modules hold shards again, and stay in memory: it is needed again at once."""
        self.gathered = False
        self.expose(self.shards)
        self._arriving = DONE
        try:
            self._check_unwritten()
        except MicsError:
            self._arriving = None
            self.memory.release()  # nobody may find what was written
            raise

    # -- places -------------------------------------------------------------------------------------

    def live(self, *, at_home: bool) -> None:
        """Be gathered at home, or in memory of its own, from now on."""
        if at_home != self.memory.at_home:
            self.release()
            self.memory.at_home = at_home
            self._follow_memory()

    def make_room(self) -> bool:
        """Have the home to itself, but for units that are in use; whether that is so."""
        for unit in self._neighbours:
            if unit.is_arriving and unit.memory.at_home:
                unit.release()  # it was sent for too early
        return self.memory.home_is_free

    def move_out(self) -> None:
        """Have no home, for now. Nobody may hold a graph of a forward of before."""
        self.release()
        self._neighbours = []
        self.memory.move_out()
        self._follow_memory()

    def move_in(self, home: Tensor, neighbours: Sequence[Unit]) -> None:
        """Be gathered at ``home`` from now on, which overlaps the homes of ``neighbours``."""
        self.release()
        self._neighbours = list(neighbours)
        self.memory.move_in(home, [unit.memory for unit in neighbours])
        self._follow_memory()

    # -- values -------------------------------------------------------------------------------------

    def expose(self, params: Sequence[nn.Parameter]) -> None:
        """Let the modules that hold this unit's parameters hold ``params``."""
        for table, attribute, index in self._entries:
            dict.__setitem__(table, attribute, params[index])
        for rnn in self._rnns.values():
            # torch's recurrent modules keep a second list of their weights, and compute with that one.
            rnn._flat_weights = [dict.get(rnn._parameters, name) for name in rnn._flat_weights_names]

    def shards_outside(self, tables: Collection[int]) -> list[nn.Parameter]:
        """What none of the modules with these tables, by their ids, holds."""
        held = {index for table, _, index in self._entries if id(table) in tables}
        return [shard for index, shard in enumerate(self.shards) if index not in held]

    def refresh(self) -> None:
        """Carry the masters into ``param_shard``, of all replicas' pieces."""
        refresh_together([self])

    def num_edits(self) -> int:
        """A number that grows with every write to the masters."""
        with plainly():
            return sum(shard._version for shard in self.shards)

    def masters_changed(self) -> bool:
        """Whether somebody wrote to ``shards`` since the last refresh (load_state_dict, in-place edits)."""
        return self._versions != self.num_edits()

    def holds_edit(self) -> bool:
        """Whether such a write stands in this rank's ``param_shard``, and not yet in the other replicas'."""
        in_place = not self.spec.has_masters and self.share.masters_over_replicas
        return in_place and self.masters_changed()

    def arrived_params(self) -> Tensor:
        """``param_shard`` to read, with the other replicas' pieces of the last refresh."""
        self._refreshed.wait()
        return self.param_shard

    def __reduce__(self) -> Any:
        raise MicsError(UNCOPYABLE)

    def __del__(self) -> None:
        """Let the computation wait for what lanes still do with this unit's memory: others get it next.

        On a GPU alone: a thread's job keeps its tensors, and might wait for ranks that are gone.
        """
        if self.device.type == "cuda":
            for ticket in (self._arriving, self._gather_read, self._refreshed, self.gradients.ticket):
                with suppress(Exception):  # the interpreter may be on its way out
                    if ticket is not None:
                        ticket.wait()

    def check_intact(self) -> None:
        """Raise if the optimizer's parameters no longer are the memory of ``master``."""
        home = self.master.untyped_storage().data_ptr()
        with plainly():
            moved = any(shard.untyped_storage().data_ptr() != home for shard in self.shards)
        if moved:
            raise MicsError(
                f"{self.spec.label}: expected its parameters where mics.shard() put them, found them "
                "replaced, so this step "
                "would change nothing; do not call model.to(), .half() or .float() after mics.shard()"
            )

    def load(self, flat: Tensor) -> None:
        """Take this rank's part of ``flat``, all values of the unit in flat order."""
        self.settle_params()
        if not self.spec.casts_masters:
            chunk = self.share.chunk_span(self.spec.layout)
            self.param_shard.copy_(flat[chunk.start : chunk.stop])
        if self.spec.trainable:
            span = self.share.master_span(self.spec)
            self.master.copy_(flat[span.start : span.stop])
        self._versions = self.num_edits()
        self.num_refreshes += 1

    def full_of_masters(self, masters: Tensor) -> Tensor:
        """All ranks' ``masters`` (laid out as ``self.master``) as one flat buffer: [numel]."""
        layout = self.spec.layout
        chunk = masters
        if self.share.masters_over_replicas:
            chunk = masters.new_empty(layout.chunk_numel)
            self._mesh.replication.all_gather(chunk, masters, in_call(self.spec.label)).wait()
        flat = masters.new_empty(layout.numel)
        self._mesh.gather.all_gather(flat, chunk, in_call(self.spec.label)).wait()
        return flat

    def views_of(self, masters: Tensor) -> list[Tensor]:
        """Each parameter's part of a tensor laid out as ``self.master``, shaped like ``shards``."""
        return self.share.views_of(self.spec, masters)

    # -- inside -------------------------------------------------------------------------------------

    def settle_params(self) -> None:
        """Wait for the lanes: from here on the caller may write to ``param_shard``."""
        if self._arriving is not None:
            self.release()  # it would bring the values of before
        self._gather_read.wait()
        self._refreshed.wait()
        self._gather_read = self._refreshed = DONE

    def _follow_requires_grad(self, shard: nn.Parameter, full: nn.Parameter) -> None:
        if shard.requires_grad and not self.spec.trainable:
            raise SettingsError(
                f"{self.spec.label}: expected its parameters to stay frozen, found requires_grad=True; they "
                "were frozen when mics.shard() ran, so there is no room for their gradients. Shard the model "
                "with requires_grad=True, and freeze what is to be trained later after mics.shard()"
            )
        full.requires_grad_(shard.requires_grad)

    def _check_held(self) -> None:
        """Raise if a module was given another parameter in place of one of ours."""
        for table, attribute, index in self._entries:
            if dict.get(table, attribute) is not self.shards[index]:
                raise MicsError(
                    f"{self.spec.refs[index].name}: expected the parameter that mics.shard() put "
                    "there, found another; "
                    "replace parameters before sharding, or write to them in mics.summon(model, "
                    "writeback=True)"
                )

    def _check_unwritten(self) -> None:
        """Raise if a module wrote to its gathered parameters: that would be lost."""
        if self._writes_are_lost and any(param._version for param in self.full):
            names = [held.name for held, p in zip(self.spec.refs, self.full, strict=True) if p._version]
            for param in self.full:
                torch._C._autograd._unsafe_set_version_counter((param,), (0,))
            raise MicsError(
                f"{names[0]}: expected a forward that reads its parameters, found one that wrote to "
                "it in place "
                "(as nn.Embedding(max_norm=...) does); the change would be lost, make it in "
                "mics.summon(model, "
                "writeback=True)"
            )

    def _wants_gather(self) -> bool:
        """Whether it can be sent for: it is not here, and there is a place for it."""
        if self.gathered or self._arriving is not None:
            return False
        if self.masters_changed():
            self.refresh()
        return self.memory.is_free

    def _own_chunk(self) -> Tensor:
        """This rank's chunk of the gathered parameters."""
        span = self.share.chunk_span(self.spec.layout)
        return self.flat[span.start : span.stop]

    def _follow_memory(self) -> None:
        """Let the full parameters be views of where the memory is now."""
        for param, view in zip(self.full, self.memory.views(), strict=True):
            param.data = view

    def _install(self) -> list[tuple[ParameterTable, str, int]]:
        entries = []
        for index, held in enumerate(self.spec.refs):
            for module, attribute in held.places:
                table = ParameterTable.of(module)
                table.units[attribute] = self
                entries.append((table, attribute, index))
        return entries


def send_for(units: Sequence[Unit]) -> list[Unit]:
    """Gather units ahead of their use, by one collective, as far as there are places for them: which."""
    wanted = []
    for unit in units:
        if unit._wants_gather():
            unit.memory.acquire()
            wanted.append(unit)
    if not wanted:
        return []
    if not wanted[0].memory.is_own:  # one rank a group, whose shard is the whole unit
        for unit in wanted:
            unit._arriving = unit._refreshed
        return wanted
    casts = [(unit._own_chunk(), unit.param_shard) for unit in wanted if unit.spec.casts_masters]
    refreshed = tuple(unit._refreshed for unit in wanted)
    ticket = wanted[0]._mesh.gather.gather_together(
        [(unit.flat, unit._own_chunk() if unit.spec.casts_masters else unit.param_shard) for unit in wanted],
        label_of([unit.spec for unit in wanted]),
        prepare=partial(_cast, casts) if casts else None,
        after=refreshed,
    )
    for unit in wanted:
        unit._arriving = unit._gather_read = ticket
    return wanted


def _cast(casts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Bring masters to where their gather begins. On its lane."""
    torch._foreach_copy_([chunk for chunk, _ in casts], [master for _, master in casts])


def refresh_together(units: Sequence[Unit]) -> None:
    """Carry the masters of several units into their ``param_shard``, by one collective over the replicas."""
    for unit in units:
        unit.settle_params()
        if unit._own_params is not unit.master:
            unit._own_params.copy_(unit.master)
    if units and units[0].share.masters_over_replicas:
        pairs = [(unit._incoming, unit._own_params) for unit in units]
        label = f"new values of {label_of([unit.spec for unit in units])}"
        ticket = units[0]._mesh.replication.gather_together(pairs, label)
        for unit in units:
            unit._refreshed = ticket
    for unit in units:
        unit._versions = unit.num_edits()
        unit.num_refreshes += 1
