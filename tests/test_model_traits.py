"""Whatever a model does, sharding it changes nothing: one trait of models per test.

Each is trained for a few steps on two nodes of two ranks, in a partition group of two with two
replicas and in one of four over both nodes, and compared to the bit with plain training.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests import pairwise, tiers, toys
from tests.compare import SHARDINGS, assert_trains_like_plain
from tests.ranks import run_ranks
from tests.reference import SEED, Recipe, Sharding, Tolerance, sgd, train_sharded

ROUNDING = Tolerance(rtol=1e-4)
"""Where a gradient is summed in parts: the same terms in another order."""


def _recipe(build: Any, **options: Any) -> Recipe:
    options = {"batch": toys.floats, "accumulation": 2, **options}
    return Recipe(build=build, **options)


@pytest.mark.parametrize(
    "build",
    [
        toys.LoRA,
        toys.CalledTwice,
        toys.MixedDtypes,
        toys.NoParameters,
        toys.Parametrized,
        toys.Nothing,
        toys.ReturnsParameters,
        *(
            pytest.param(build, marks=pytest.mark.full)
            for build in (
                *(toys.Chain, toys.FrozenMiddle, toys.Recurrent, toys.Objects, toys.InputUntouched),
                *(toys.SkipConnections, toys.InPlace),
            )
        ),
    ],
)
def test_models_of_every_make(build: type[nn.Module]) -> None:
    """Frozen, reused, mixed, empty and oddly connected modules; see the class for its trait."""
    assert_trains_like_plain(_recipe(build))


def test_a_returned_parameter_that_the_loss_begins_to_use_late() -> None:
    """By then units have their homes, and another one is where the returned view was."""
    loss = partial(toys.use_gain_late, first=4)
    assert_trains_like_plain(
        _recipe(toys.ReturnsParameters, batch=toys.numbered, loss=loss, num_steps=6, accumulation=1)
    )


def test_tied_weights() -> None:
    """Matrices shared between units and a block listed twice keep one value and all their gradients."""
    outcomes = assert_trains_like_plain(_recipe(toys.TiedBlocks), tolerance=ROUNDING)
    for outcome in outcomes:
        state = outcome.state_dict
        assert torch.equal(state["blocks.0.up.weight"], state["blocks.1.up.weight"])
        assert torch.equal(state["blocks.2.down.weight"], state["blocks.3.down.weight"])
        assert "blocks.1.up.weight" not in outcome.parameters


def test_frozen_parameters_stay_as_they_were() -> None:
    """LoRA: what is frozen keeps its first bits and has no optimizer state; the rest moves."""
    torch.manual_seed(SEED)
    before = toys.LoRA().state_dict()
    for outcome in assert_trains_like_plain(_recipe(toys.LoRA)):
        for name, value in outcome.state_dict.items():
            frozen = "base" in name or "stem" in name
            assert torch.equal(value, before[name]) == frozen
            assert (name in outcome.optimizer_state) != frozen


def test_parameters_unused_in_some_step_on_all_ranks() -> None:
    """A layer nobody used has no gradient (not a zero one), so weight decay leaves it alone."""
    recipe = _recipe(toys.Branches, batch=toys.which_by_step, num_steps=4)
    (outcome,) = assert_trains_like_plain(recipe, shardings=SHARDINGS[:1])
    assert_trains_like_plain(recipe, shardings=SHARDINGS[1:])
    first, second = outcome.gradients[:2]
    assert first["blocks.0.second.weight"] is None and second["blocks.0.second.weight"] is not None


def test_parameters_unused_on_some_ranks() -> None:
    """A layer some ranks used has the mean over all ranks, those without counting as zero."""
    assert_trains_like_plain(_recipe(toys.Branches, batch=toys.which_by_rank, num_steps=4))


@pytest.mark.parametrize("batch", tiers.first([toys.skip_by_micro, toys.skip_by_step]))
def test_units_left_out_of_a_step(batch: Any) -> None:
    """Whole units that are not called: in a whole step, or in one of its micro-steps."""
    assert_trains_like_plain(_recipe(toys.SkippedBlock, batch=batch, num_steps=4))


def test_batch_norm_buffers() -> None:
    """Running statistics follow rank 0's data, constants stay, and counters count micro-steps."""
    outcomes = assert_trains_like_plain(_recipe(toys.Convolutional, batch=toys.images))
    for outcome in outcomes:
        assert outcome.state_dict["blocks.0.1.num_batches_tracked"].item() == 6
        assert "hidden" not in outcome.state_dict


def test_several_forwards_before_one_backward() -> None:
    """Two forwards, one backward: each parameter's gradient has both parts."""
    assert_trains_like_plain(_recipe(toys.Chain, loss=toys.two_forwards))


@pytest.mark.parametrize(
    ("model", "accumulation"),
    tiers.first(
        [
            ((toys.Chain, toys.three_losses), 2),
            ((toys.Plain, toys.two_backwards), 1),
            ((toys.Plain, toys.two_backwards), 2),
            ((toys.Chain, toys.three_losses), 1),
        ],
        1,
        3,
    ),
)
def test_several_backwards_in_one_micro_step(model: tuple[Any, Any], accumulation: int) -> None:
    """More backwards than micro-steps, also after an announced hop 2: everything is counted once."""
    build, loss = model
    recipe = _recipe(build, loss=loss, accumulation=accumulation)
    assert_trains_like_plain(recipe, tolerance=ROUNDING)
    assert_trains_like_plain(recipe, tolerance=ROUNDING, announced=True, record_gradients=False)


def _evaluate(model: nn.Module, step: int) -> float:
    """The loss of a fixed batch, without gradients, in evaluation mode."""
    model.eval()
    with torch.no_grad() if step % 2 else torch.inference_mode():
        loss = model(*toys.floats(0, 0, 99)).item()
    model.train()
    return loss


def test_evaluation_between_steps() -> None:
    """`eval()` with `no_grad` and `inference_mode` after each step sees that step's parameters."""
    assert_trains_like_plain(_recipe(toys.Chain, between_steps=_evaluate))


def _evaluate_images(model: nn.Module, step: int) -> float:
    model.eval()
    with torch.no_grad():
        loss = model(*toys.images(0, 0, 99)).item()
    model.train()
    return loss


def test_evaluation_with_buffers() -> None:
    """Evaluation uses rank 0's running statistics on every rank, as under DDP."""
    recipe = _recipe(toys.Convolutional, batch=toys.images, between_steps=_evaluate_images)
    assert_trains_like_plain(recipe)


def _evaluate_sequences(model: nn.Module, step: int) -> float:
    model.eval()
    with torch.no_grad():
        loss = model(*toys.sequences(0, 0, 99)).item()
    model.train()
    return loss


def test_fused_attention_in_evaluation() -> None:
    """torch's encoder layer reads its submodules' weights without calling them in evaluation."""
    recipe = _recipe(toys.Attention, batch=toys.sequences, between_steps=_evaluate_sequences)
    assert_trains_like_plain(recipe)


@pairwise.parametrize(
    strength=1,
    build=[toys.CheckpointAround, toys.CheckpointInside, toys.CheckpointSpan],
    reentrant=[False, True],
)
def test_activation_checkpointing(build: Any, reentrant: bool) -> None:
    """Both variants of `torch.utils.checkpoint`, around a unit, inside one, over several."""
    assert_trains_like_plain(_recipe(partial(build, reentrant=reentrant)))


@pytest.mark.parametrize(
    "units",
    [
        (toys.Stage, toys.Block),
        pytest.param((nn.Linear, toys.Nested), marks=pytest.mark.full),
        pytest.param((toys.Stage,), marks=pytest.mark.full),
        pytest.param((toys.Block,), marks=[pytest.mark.full, pytest.mark.long]),
        pytest.param((nn.Linear,), marks=[pytest.mark.full, pytest.mark.long]),
    ],
)
def test_nested_units(units: tuple[type[nn.Module], ...]) -> None:
    """Units inside units, only the outer, only the inner, single layers, and the root as a unit."""
    assert_trains_like_plain(_recipe(toys.Nested), units=units)


@pytest.mark.parametrize("world_size", [4, 8])
def test_a_model_smaller_than_the_world(world_size: int) -> None:
    """Two numbers over four and eight ranks: most shards are empty."""
    shardings = [
        Sharding(partition_size=size, optimizer_sharding=sharding)
        for size in (1, world_size)
        for sharding in ("world", "partition")
    ]
    assert_trains_like_plain(_recipe(toys.Tiny), world_size=world_size, shardings=shardings)


def test_weights_used_without_calling_their_module() -> None:
    """`x @ embedding.weight.T`, `F.linear(x, layer.weight)`, a weight read from inside a block."""
    recipe = _recipe(toys.Functional, batch=toys.tokens)
    assert_trains_like_plain(recipe, tolerance=ROUNDING)


@pytest.mark.parametrize("low_memory", tiers.first([False, True]))
def test_weights_read_before_their_module_is_called(low_memory: bool) -> None:
    """Nobody sees when the last use of such a weight is over: not before the forward, or the backward, is."""
    assert_trains_like_plain(
        _recipe(partial(toys.ReadAhead, 2)), tolerance=ROUNDING, options={"low_memory": low_memory}
    )


def test_auxiliary_losses_on_attributes() -> None:
    """A loss that a block leaves on itself reaches the block's parameters."""
    assert_trains_like_plain(_recipe(toys.Experts, loss=toys.with_aux_losses), tolerance=ROUNDING)


@pytest.mark.full
def test_double_precision() -> None:
    """A float64 model keeps float64 masters, gradients and sums."""
    recipe = _recipe(partial(_as_double, toys.Plain), loss=_double_loss)
    for outcome in assert_trains_like_plain(recipe):
        assert all(value.dtype is torch.float64 for value in outcome.state_dict.values())


def _as_double(build: Any) -> nn.Module:
    return build().double()


def _double_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, target = batch
    return torch.nn.functional.mse_loss(model(x.double()), target.double())


# ---------------------------------------------------------------------------------------------
# Where weights come from
# ---------------------------------------------------------------------------------------------


def _initial_values(seed_by_rank: bool, meta: bool) -> tuple[dict[str, Any], dict[str, Any], int]:
    """All ranks' view of the full state after sharding, this rank's own values before it, and bytes sent."""
    import torch.distributed as dist

    import mics

    torch.manual_seed(SEED + (dist.get_rank() if seed_by_rank else 0))
    with torch.device("meta" if meta else "cpu"):
        model = toys.Language()
    own = {} if meta else {name: value.clone() for name, value in model.state_dict().items()}
    mics.shard(model, partition_size=2)
    assert not any(p.is_meta for p in model.parameters())
    nbytes = mics.traffic(model).axis_nbytes("world")
    return mics.full_state_dict(model, rank0_only=False), own, nbytes


def test_initial_values_are_rank_zeros() -> None:
    """Ranks built from different seeds all start from rank 0's weights."""
    answers = run_ranks(4, _initial_values, True, False, ranks_per_node=2)
    assert not torch.equal(answers[0][1]["head.weight"], answers[1][1]["head.weight"])
    for full, *_ in answers:
        assert list(full) == list(answers[0][1])
        assert all(torch.equal(full[name], value) for name, value in answers[0][1].items())


def test_a_meta_model_is_initialised_alike_everywhere() -> None:
    """A model on the meta device gets its modules' own initial values, equal on all replicas."""
    answers = run_ranks(4, _initial_values, True, True, ranks_per_node=2)
    first = answers[0][0]
    for full, *_ in answers:
        assert all(torch.equal(full[name], value) for name, value in first.items())
    assert torch.equal(first["blocks.0.norm.weight"], torch.ones(toys.DIM))
    assert torch.equal(first["blocks.1.norm.bias"], torch.zeros(toys.DIM))
    assert first["blocks.0.up.weight"].std() > 0.05
    assert not torch.equal(first["blocks.0.up.weight"], first["blocks.1.up.weight"])
    assert torch.equal(first["head.weight"], first["embedding.weight"])
    assert torch.equal(first["blocks.0.gain"], torch.tensor([0.7]))


@pytest.mark.parametrize("meta", [False, True])
def test_values_that_are_equal_already_are_not_sent(meta: bool) -> None:
    """Ranks of one seed send digests alone; those of several send what rank 0 has, and end alike."""
    alike, apart = (
        run_ranks(4, _initial_values, by_rank, meta, ranks_per_node=2) for by_rank in (False, True)
    )
    for full, *_ in [*alike, *apart]:
        assert all(torch.equal(full[name], value) for name, value in alike[0][0].items())
    all_nbytes = sum(value.nbytes for value in alike[0][0].values())
    assert alike[0][2] < all_nbytes / 10 < all_nbytes < apart[0][2]


def _train_meta() -> list[list[float]]:
    import torch.distributed as dist

    import mics

    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = toys.Chain()
    mics.shard(model, partition_size=2)
    optimizer = sgd(model)
    losses = []
    for _ in range(8):
        loss = model(*toys.floats(0, 0, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_meta_model_trains() -> None:
    """The loss of one repeated batch falls, and is the same on every rank."""
    losses = run_ranks(4, _train_meta, ranks_per_node=2)
    assert all(row == losses[0] for row in losses)
    assert losses[0][-1] < 0.5 * losses[0][0]


def test_a_single_process_without_a_launcher() -> None:
    """No process group and no variables: `mics.shard` trains as plain training does."""
    recipe = _recipe(toys.Chain)
    sharding = Sharding(partition_size=1, record_gradients=True)
    (outcome,) = run_ranks(1, train_sharded, recipe, sharding, launch="none")
    from tests.reference import differences, train_ordered

    expected = train_ordered(recipe, world_size=1, partition_size=1, ranks_per_node=1)
    assert not differences(outcome, expected)


def test_bfloat16_parameters_and_inputs() -> None:
    """bf16 parameters over fp32 masters: float inputs are brought to bf16 for the model."""
    recipe = _recipe(toys.Chain, param_dtype=torch.bfloat16, loss=_bf16_loss)
    assert_trains_like_plain(recipe, shardings=SHARDINGS)


def _bf16_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, target = batch
    return model(x.bfloat16(), target)
