"""One unit: its shard, its gathered parameters, and hop 1 of its gradients.

Tensors of a unit of ``numel`` elements (padding included) on one rank, with p chunks and R pieces::

    param_shard  [numel/p]          param format     this rank's chunk; what gathers read
    master       [numel/p/R]        master format    what the optimizer updates ([numel/p] if it is not
                                                     sharded over replicas); the very memory of
                                                     ``param_shard`` where the formats agree
    grad_shard   [numel/p]          float32          hop 1 adds every micro-step to it
    flat         [numel]            param format     the gathered parameters; no memory while released
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from mics.comm.lanes import DONE, Ticket
from mics.comm.world import MeshCollectives
from mics.errors import UNCOPYABLE, MicsError, SettingsError
from mics.layout import Slot
from mics.reduce_buffer import ReduceBuffer, ReduceViews
from mics.unit_spec import Share, UnitSpec


class GradState(enum.Enum):
    """What ``grad_shard`` holds. EMPTY -> PARTIAL (hop 1) -> REDUCED (hop 2) -> EMPTY (zero_grad).

    More backwards after hop 2 lead from REDUCED back to PARTIAL.
    """

    EMPTY = enum.auto()
    PARTIAL = enum.auto()
    REDUCED = enum.auto()


class ParameterTable(dict[str, nn.Parameter | None]):
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


class Unit:
    """The parameters that are gathered and released together."""

    def __init__(
        self,
        spec: UnitSpec,
        share: Share,
        *,
        mesh: MeshCollectives,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.share = share
        self.label = f"unit {spec.name!r}"
        self.device = device
        self.gathered = False
        self.grad_state = GradState.EMPTY
        self.used = [False] * len(spec.refs)  # parameters that got a gradient on this rank since zero_grad
        self.on_access: Callable[[Unit], None] = lambda unit: None  # set by the schedule
        self._mesh = mesh
        self._versions = 0
        self.num_refreshes = 0
        # Lanes work on these beside the computation; whoever touches the memory waits for its ticket.
        self._arriving: Ticket | None = None  # a gather that is under way, for ``flat``
        self._gather_read: Ticket = DONE  # the last gather, for ``param_shard``
        self._refreshed: Ticket = DONE  # for ``param_shard``
        self._reduced: Ticket = DONE  # for ``grad_shard``
        layout = spec.layout

        self.param_shard = torch.zeros(layout.chunk_numel, dtype=spec.param_dtype, device=device)
        self._own_params = self._own_of(self.param_shard)  # what ``master`` is the master of
        # The same memory with a version counter of its own: what lanes write to it is nobody's edit.
        self._incoming = self.param_shard.data
        self.master = self._make_master()
        self.shards = [
            nn.Parameter(view, requires_grad=spec.trainable) for view in self.views_of(self.master)
        ]
        self.grad_shard: Tensor | None = None  # made by the first backward
        self.grads: list[Tensor] = []  # view of grad_shard for each entry of ``shards``
        self._own_grads: Tensor | None = None  # the part of grad_shard that ``master`` covers

        # With one rank a group the shard is the whole unit: nothing to gather, nothing to allocate.
        alone = mesh.gather.size == 1
        self.flat = self.param_shard if alone else torch.empty_like(self.param_shard).new_empty(layout.numel)
        self.full = [self._view_of_flat(slot) for slot in layout.slots]
        self._flat_storage = None if alone else self.flat.untyped_storage()
        self._flat_nbytes = self.flat.untyped_storage().nbytes()
        self._release_memory()
        self._entries = self._install()
        self._writes_are_lost = not (alone and self.master is self.param_shard and mesh.replication.size == 1)
        self._rnns = {id(m): m for ref in spec.refs for m, _ in ref.places if isinstance(m, nn.RNNBase)}
        for rnn in self._rnns.values():
            # cuDNN would move the weights to a buffer of its own, away from ``flat``.
            rnn.flatten_parameters = lambda: None  # type: ignore[method-assign]
        for ref, shard, full in zip(spec.refs, self.shards, self.full, strict=True):
            # Marks that users hang on parameters, such as "no weight decay".
            shard.__dict__.update(ref.param.__dict__)
            full.__dict__.update(ref.param.__dict__)
            if spec.trainable:
                shard.register_hook(partial(_refuse_gradient, ref.name))
        self.expose(self.shards)

    # -- parameters ---------------------------------------------------------------------------------

    @property
    def is_arriving(self) -> bool:
        """Whether it has been sent for and not been used yet."""
        return self._arriving is not None

    def start_gather(self) -> None:
        """Send for the full parameters, ahead of their use."""
        if self.gathered or self._arriving is not None:
            return
        if self.masters_changed():
            self.refresh()
        if self._flat_storage is None:
            self._arriving = self._refreshed
            return
        self._flat_storage.resize_(self._flat_nbytes)
        self._arriving = self._mesh.gather.all_gather(
            self.flat, self.param_shard, self.label, after=(self._refreshed,)
        )
        self._gather_read = self._arriving

    def gather(self) -> None:
        """Make the full parameters what the modules hold."""
        if self.gathered:
            return
        if self._arriving is not None and self.masters_changed():
            self.release()  # what is on its way is out of date
        self.start_gather()
        assert self._arriving is not None
        self._arriving.wait()
        self._arriving = None
        self._check_held()
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
            self._release_memory()
        if not self.gathered:
            return
        self.gathered = False
        self._check_unwritten()
        self._release_memory()
        self.expose(self.shards)

    def expose(self, params: Sequence[nn.Parameter]) -> None:
        """Let the modules that hold this unit's parameters hold ``params``."""
        for table, attribute, index in self._entries:
            dict.__setitem__(table, attribute, params[index])
        for rnn in self._rnns.values():
            # torch's recurrent modules keep a second list of their weights, and compute with that one.
            rnn._flat_weights = [dict.get(rnn._parameters, name) for name in rnn._flat_weights_names]

    def refresh(self) -> None:
        """Carry the masters into ``param_shard``, of all replicas' pieces."""
        if self.spec.trainable:
            self._settle_params()
            if self._own_params is not self.master:
                self._own_params.copy_(self.master)
            if self.share.masters_over_replicas:
                self._refreshed = self._mesh.replication.all_gather(
                    self._incoming, self._own_params, self.label
                )
        self._versions = self.num_edits()
        self.num_refreshes += 1

    def num_edits(self) -> int:
        """A number that grows with every write to the masters."""
        return sum(shard._version for shard in self.shards)

    def masters_changed(self) -> bool:
        """Whether somebody wrote to ``shards`` since the last refresh (load_state_dict, in-place edits)."""
        return self._versions != self.num_edits()

    def __reduce__(self) -> Any:
        raise MicsError(UNCOPYABLE)

    def __del__(self) -> None:
        """Let the computation wait for what lanes still do with this unit's memory: others get it next.

        On a GPU alone: a thread's job keeps its tensors, and might wait for ranks that are gone.
        """
        if self.device.type == "cuda":
            for ticket in (self._arriving, self._gather_read, self._refreshed, self._reduced):
                with suppress(Exception):  # the interpreter may be on its way out
                    if ticket is not None:
                        ticket.wait()

    def check_intact(self) -> None:
        """Raise if the optimizer's parameters no longer are the memory of ``master``."""
        home = self.master.untyped_storage().data_ptr()
        if any(shard.untyped_storage().data_ptr() != home for shard in self.shards):
            raise MicsError(
                f"{self.label}: expected its parameters where mics.shard() put them, found them "
                "replaced, so this step "
                "would change nothing; do not call model.to(), .half() or .float() after mics.shard()"
            )

    def load(self, flat: Tensor) -> None:
        """Take this rank's part of ``flat``, all values of the unit in flat order."""
        self._settle_params()
        chunk = self.share.chunk_span(self.spec.layout)
        self.param_shard.copy_(flat[chunk.start : chunk.stop])
        if self.spec.trainable:
            span = self.share.master_span(self.spec.layout, trainable=True)
            self.master.copy_(flat[span.start : span.stop])
        self._versions = self.num_edits()
        self.num_refreshes += 1

    def full_of_masters(self, masters: Tensor) -> Tensor:
        """All ranks' ``masters`` (laid out as ``self.master``) as one flat buffer: [numel]."""
        layout = self.spec.layout
        chunk = masters
        if self.spec.trainable and self.share.masters_over_replicas:
            chunk = masters.new_empty(layout.chunk_numel)
            self._mesh.replication.all_gather(chunk, masters, self.label).wait()
        flat = masters.new_empty(layout.numel)
        self._mesh.gather.all_gather(flat, chunk, self.label).wait()
        return flat

    def views_of(self, masters: Tensor) -> list[Tensor]:
        """Each parameter's part of a tensor laid out as ``self.master``, shaped like ``shards``."""
        return [self._slot_view(masters, slot) for slot in self.spec.layout.slots]

    # -- gradients ----------------------------------------------------------------------------------

    def has_full_grads(self) -> bool:
        """Whether backward left gradients on the full parameters."""
        return any(param.grad is not None for param in self.full)

    def drop_full_grads(self) -> None:
        """Forget gradients that will not be reduced (a backward that failed)."""
        for param in self.full:
            param.grad = None

    def reduce(self, buffer: ReduceBuffer, scale: float) -> None:
        """Hop 1: add ``scale`` times the partition group's sum of gradients to ``grad_shard``."""
        views = self._lay_out(buffer)
        grad_shard = self._grad_shard()
        self._drop_cleared()
        total = views.full if self._mesh.reduce.size == 1 else views.shard
        add = partial(self._add, grad_shard, total, scale, self.grad_state)
        self._reduced = self._mesh.reduce.reduce_scatter(
            total, views.full, self.label, after=(self._reduced,), then=add
        )
        buffer.emptied = self._reduced
        self.grad_state = GradState.PARTIAL
        for index, param in enumerate(self.full):
            self.used[index] |= param.grad is not None
            param.grad = None

    def reduce_over_replicas(self) -> None:
        """Hop 2: the part of ``grad_shard`` that the optimizer uses becomes the sum over the world."""
        self._drop_cleared()
        if self.grad_state is not GradState.PARTIAL:
            return
        assert self.grad_shard is not None
        replicas, before = self._mesh.replication, (self._reduced,)
        if replicas.size == 1:
            pass  # hop 1 was all there is
        elif self.share.masters_over_replicas:
            self._reduced = replicas.reduce_scatter(
                self.step_gradient(), self.grad_shard, self.label, after=before
            )
        else:
            self._reduced = replicas.all_reduce(self.grad_shard, self.label, after=before)
        self.grad_state = GradState.REDUCED

    def settle_grads(self) -> None:
        """Wait for the lanes: from here on the caller may use ``grad_shard``."""
        self._reduced.wait()
        self._reduced = DONE

    def make_reduced(self) -> None:
        """Bring the gradients to the state after hop 2, zero if there were none."""
        if self.grad_state is GradState.PARTIAL:
            self.reduce_over_replicas()
        self.settle_grads()
        if self.grad_state is GradState.EMPTY:
            self._grad_shard().zero_()
            self.grad_state = GradState.REDUCED

    def check_unhooked(self, index: int) -> None:
        """Raise if the user hooked a parameter: autograd never sees shards, so the hook would not run."""
        shard = self.shards[index]
        hooks = shard._backward_hooks  # one of them is ours
        if shard._post_accumulate_grad_hooks or (hooks is not None and len(hooks) > 1):
            raise MicsError(
                f"{self.spec.refs[index].name}: expected no hooks on parameters of a sharded model, "
                "found one, which "
                "would never run; change gradients between backward and optimizer.step() instead"
            )

    def step_gradient(self) -> Tensor:
        """The part of ``grad_shard`` that the optimizer uses."""
        assert self._own_grads is not None
        return self._own_grads

    def unique_gradient(self) -> Tensor:
        """The piece of the reduced gradient that no other rank counts: norms add these up."""
        assert self.grad_state is GradState.REDUCED and self.grad_shard is not None
        return self._piece_of(self.grad_shard)

    def forget_cleared(self) -> None:
        """Notice what zero_grad(set_to_none=True) did since the last backward."""
        if self.grad_state is not GradState.EMPTY:
            self._drop_cleared()

    # -- inside -------------------------------------------------------------------------------------

    def _lay_out(self, buffer: ReduceBuffer) -> ReduceViews:
        """Copy the full gradients to their places in the buffer."""
        views = buffer.views_for(self.spec.index, self.spec.layout)
        buffer.emptied.wait()
        pairs = [(view, param.grad) for view, param in zip(views.params, self.full, strict=True)]
        present = [(view, grad) for view, grad in pairs if grad is not None]
        # Another unit's gradients are still in the buffer: what this one does not write must become zero.
        blank = views.gaps + [view for view, grad in pairs if grad is None]
        if blank:
            torch._foreach_zero_(blank)
        torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])
        return views

    def _add(self, grad_shard: Tensor, total: Tensor, scale: float, state: GradState) -> None:
        """Add this micro-step's sum to what earlier ones left. On the lane of the reduction."""
        if state is GradState.EMPTY:
            if total.dtype is grad_shard.dtype:
                torch.mul(total, scale, out=grad_shard)
            else:
                grad_shard.copy_(total).mul_(scale)
        else:
            if state is GradState.REDUCED:
                self._keep_one_copy(grad_shard)
            grad_shard.add_(total, alpha=scale)

    def _settle_params(self) -> None:
        """Wait for the lanes: from here on the caller may write to ``param_shard``."""
        if self._arriving is not None:
            self.release()  # it would bring the values of before
        self._gather_read.wait()
        self._refreshed.wait()
        self._gather_read = self._refreshed = DONE

    def _grad_shard(self) -> Tensor:
        if self.grad_shard is None:
            self.grad_shard = torch.zeros(
                self.spec.layout.chunk_numel, dtype=self.spec.grad_dtype, device=self.device
            )
            self._own_grads = self._own_of(self.grad_shard)
            self.grads = self.views_of(self._own_grads)
        return self.grad_shard

    def _drop_cleared(self) -> None:
        """Zero what the user cleared: a parameter whose ``grad`` is None again starts anew."""
        cleared = [index for index, shard in enumerate(self.shards) if shard.grad is None]
        if len(cleared) == len(self.shards):
            self.grad_state = GradState.EMPTY
            self.used = [False] * len(self.used)
        elif cleared:
            assert self.grad_shard is not None
            self.settle_grads()
            span = self.share.chunk_span(self.spec.layout)
            for index in cleared:
                overlap = self.spec.layout.slots[index].overlap(span)
                self.grad_shard[overlap.start - span.start : overlap.stop - span.start].zero_()
                self.used[index] = False

    def _keep_one_copy(self, grad_shard: Tensor) -> None:
        """Before adding to a reduced gradient: leave it on one replica only, so that hop 2 counts it once."""
        if self._mesh.replication.size == 1:
            return
        keep = self._piece_of(grad_shard).clone()
        grad_shard.zero_()
        self._piece_of(grad_shard).copy_(keep)

    def _follow_requires_grad(self, shard: nn.Parameter, full: nn.Parameter) -> None:
        if shard.requires_grad and not self.spec.trainable:
            raise SettingsError(
                f"{self.label}: expected its parameters to stay frozen, found requires_grad=True; "
                "they were frozen when "
                "mics.shard() ran, so there are no masters for them. Set requires_grad before sharding"
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
            names = [ref.name for ref, p in zip(self.spec.refs, self.full, strict=True) if p._version]
            for param in self.full:
                torch._C._autograd._unsafe_set_version_counter((param,), (0,))
            raise MicsError(
                f"{names[0]}: expected a forward that reads its parameters, found one that wrote to "
                "it in place "
                "(as nn.Embedding(max_norm=...) does); the change would be lost, make it in "
                "mics.summon(model, "
                "writeback=True)"
            )

    def _release_memory(self) -> None:
        if self._flat_storage is not None:
            self._flat_storage.resize_(0)

    def _make_master(self) -> Tensor:
        spec = self.spec
        if not spec.trainable or spec.master_dtype is spec.param_dtype:
            return self._own_params
        return torch.zeros_like(self._own_params, dtype=spec.master_dtype)

    def _own_of(self, chunk: Tensor) -> Tensor:
        """The part of a [chunk_numel] tensor that ``master`` covers."""
        if self.spec.trainable and self.share.masters_over_replicas:
            return self._piece_of(chunk)
        return chunk

    def _piece_of(self, chunk: Tensor) -> Tensor:
        numel = self.spec.layout.piece_numel
        return chunk[self.share.piece * numel : (self.share.piece + 1) * numel]

    def _slot_view(self, own: Tensor, slot: Slot) -> Tensor:
        """One parameter's part of a tensor laid out as ``master``: [n, 1, ...], as many dims as it has."""
        span = self.share.master_span(self.spec.layout, trainable=self.spec.trainable)
        overlap = slot.overlap(span)
        piece = own[overlap.start - span.start : overlap.stop - span.start]
        return piece.view(-1, *[1] * (len(slot.shape) - 1))

    def _view_of_flat(self, slot: Slot) -> nn.Parameter:
        # ``.data`` gives the view a version counter of its own: gathering writes through ``flat``, and
        # must not look to autograd like an edit of what it saved.
        view = self.flat[slot.start : slot.stop].view(slot.shape).data
        return nn.Parameter(view, requires_grad=self.spec.trainable)

    def _install(self) -> list[tuple[ParameterTable, str, int]]:
        entries = []
        for index, ref in enumerate(self.spec.refs):
            for module, attribute in ref.places:
                table = module._parameters
                if not isinstance(table, ParameterTable):
                    table = module._parameters = ParameterTable(table)
                table.units[attribute] = self
                entries.append((table, attribute, index))
        return entries


def _refuse_gradient(name: str, grad: Tensor) -> None:
    """Autograd reached this rank's shard: somebody computed with it instead of with the whole parameter."""
    raise MicsError(
        f"{name}: expected the loss to depend on parameters through the model's forward alone, found "
        "this rank's "
        "shard of it in the loss; compute with the parameter inside a module's forward"
    )
