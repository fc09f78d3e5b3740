"""The reference GPT: its arithmetic, its behaviour, and that it can be built on the meta device."""

from dataclasses import replace

import pytest
import torch

from mics.models import GPT, GPT_SIZES, GPTConfig

TINY = GPTConfig(num_layers=2, num_heads=2, hidden_size=16, vocab_size=32, seq_len=8)


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, TINY.vocab_size, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if size.num_layers <= 48 else pytest.mark.full)
        for name, size in GPT_SIZES.items()
    ],
)
def test_every_size_has_the_parameters_it_says(name: str) -> None:
    """The closed formula equals the sum over the module; meta costs no memory, so large ones count too."""
    with torch.device("meta"):
        model = GPT(GPT_SIZES[name])
    assert sum(param.numel() for param in model.parameters()) == GPT_SIZES[name].num_parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-124m", 0.124),
        ("gpt-1.3b", 1.31),
        ("gpt-3.6b", 3.63),
        ("bert-10b", 10.15),
        ("roberta-10b", 10.25),
        ("bert-15b", 15.1),
        ("bert-20b", 20.5),
        ("roberta-20b", 20.0),
        ("gpt2-20b", 20.0),
        ("bert-50b", 50.5),
        ("roberta-50b", 50.8),
        ("gpt-100b", 101.7),
        ("gpt-175b", 175.2),
        ("gpt-1t", 1059.0),
    ],
)
def test_names_tell_the_truth(name: str, billions: float) -> None:
    """A size's name is its number of parameters."""
    assert GPT_SIZES[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_one_table_for_planner_and_bench() -> None:
    """The same name is the same model, whole; 16-bit matrix kernels need sizes that are multiples of 8."""
    from mics.bench.models import BENCH_MODELS
    from mics.cost.shapes import named_shape

    for name, config in GPT_SIZES.items():
        benched, planned = BENCH_MODELS[name].config, named_shape(name)
        assert (benched.num_layers, benched.hidden_size) == (config.num_layers, config.hidden_size)
        assert (planned.num_blocks, planned.vocab_size) == (config.num_layers, benched.vocab_size)
        assert planned.seq_len == benched.seq_len
        assert planned.num_parameters == pytest.approx(config.num_parameters, rel=4e-4)
        assert config.vocab_size % 8 == 0


def test_flops_match_what_torch_counts() -> None:
    """Model FLOPs per token equal the matrix products torch counts, with attention halved for causality."""
    from torch.utils.flop_counter import FlopCounterMode

    model, tokens = GPT(TINY), _tokens(4, TINY.seq_len)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    by_operator = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    products = by_operator["aten.mm"]
    num_tokens = tokens.numel()
    attention = 6 * TINY.num_layers * TINY.seq_len * TINY.hidden_size
    assert products == num_tokens * 6 * TINY.num_matmul_parameters
    assert TINY.flops_per_token == products // num_tokens + attention


def test_every_module_with_parameters_can_be_initialised_from_meta() -> None:
    """No buffers, and reset_parameters everywhere: after it, a model from meta starts like any other."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(TINY)
    assert not list(model.buffers())
    model.to_empty(device="cpu")
    for module in model.modules():
        if list(module.parameters(recurse=False)):
            module.reset_parameters()  # type: ignore[operator]
    tokens = _tokens(4, TINY.seq_len)
    loss = model(tokens, _tokens(4, TINY.seq_len))
    assert loss.item() == pytest.approx(torch.tensor(float(TINY.vocab_size)).log().item(), abs=0.1)


def test_it_is_causal() -> None:
    """A later token changes nothing that was said before it."""
    model, tokens = GPT(TINY).eval(), _tokens(1, 8)
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % TINY.vocab_size
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=0)
    assert not torch.equal(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("rotary", [True, False])
def test_position_matters(rotary: bool) -> None:
    """Attention alone cannot tell an order; the positions do."""
    config = replace(TINY, rotary=rotary)
    model = GPT(config).eval()
    assert sum(param.numel() for param in model.parameters()) == config.num_parameters
    tokens = torch.tensor([[1, 2, 3, 4]])
    swapped = torch.tensor([[2, 1, 3, 4]])
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1])


def test_it_can_look_both_ways() -> None:
    """Without causality a later token changes what was said before it, and attention costs twice as much."""
    config = replace(TINY, causal=False)
    model, tokens = GPT(config).eval(), _tokens(1, 8)
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % TINY.vocab_size
    assert not torch.equal(model(tokens)[:, :5], model(changed)[:, :5])
    attention = 6 * TINY.num_layers * TINY.seq_len * TINY.hidden_size
    assert config.flops_per_token - TINY.flops_per_token == attention


def test_loss_is_the_mean_cross_entropy_of_the_logits() -> None:
    """With targets the module returns what one would compute from its logits."""
    model, tokens, targets = GPT(TINY), _tokens(3, 8), _tokens(3, 8).flip(0)
    expected = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets), expected)


def test_tied_weights_are_one_parameter() -> None:
    """Tying removes the head's own matrix."""
    tied = GPT(GPTConfig(**{**TINY.__dict__, "tie_weights": True}))
    assert tied.head.weight is tied.embedding.weight


def test_generate_appends_and_repeats_with_the_seed() -> None:
    """Sampling runs past seq_len, keeps the prompt, and is the same for the same seed."""
    model, prompt = GPT(TINY).eval(), _tokens(1, 3)
    first, second = (
        model.generate(prompt, 12, top_k=5, generator=torch.Generator().manual_seed(3)) for _ in range(2)
    )
    assert first.shape == (1, 15)
    assert torch.equal(first, second)
    assert torch.equal(first[:, :3], prompt)


def test_generate_goes_through_the_module_call() -> None:
    """Hooks of a sharded model are on the call, so generate must use it once for each token."""
    model, calls = GPT(TINY).eval(), []
    model.register_forward_hook(lambda *_: calls.append(None))
    model.generate(_tokens(1, 3), 4, temperature=0.0)
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_layers": 0}, "num_layers"), ({"hidden_size": 15}, "multiple of"), ({"dropout": 1.0}, "dropout")],
)
def test_a_shape_that_cannot_be_is_refused(change: dict[str, float], message: str) -> None:
    """The config checks itself and names the number."""
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{**TINY.__dict__, **change})


def test_too_many_tokens_are_refused() -> None:
    """The error names the limit instead of failing somewhere inside."""
    with pytest.raises(ValueError, match="seq_len=8"):
        GPT(TINY)(_tokens(1, 9))
