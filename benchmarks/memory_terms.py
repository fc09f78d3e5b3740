"""Memory of a rank, term by term: what the planner says of a model's shape, and what a real run has.

    torchrun --nproc-per-node 4 benchmarks/memory_terms.py --partition-size 2

Small models, bf16 parameters, AdamW, one unit gathered ahead, after three steps, on rank 0: our own GPT and,
where transformers is installed, a Llama with fewer key heads and a GPT-2 with tied weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mics
from mics.cost.memory import Division, Keeping, memory_terms
from mics.cost.modules import shape_of_module
from mics.models.gpt import GPT, GPTConfig

TERMS = ("parameters", "gradients", "masters", "optimizer state", "gathered units", "reduce buffers")
VOCABULARY, WIDTH, LAYERS, TOKENS = 512, 128, 6, 32


def gpt() -> nn.Module:
    return GPT(
        GPTConfig(
            num_layers=LAYERS,
            num_heads=4,
            hidden_size=WIDTH,
            vocab_size=VOCABULARY,
            seq_len=TOKENS,
            rotary=False,
        )
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=TOKENS,
        )
    )


def tied_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=TOKENS,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    found = model(tokens, tokens) if isinstance(model, GPT) else model(input_ids=tokens, labels=tokens).loss
    assert isinstance(found, Tensor)
    return found


def compare(build: Callable[[], nn.Module], partition_size: int) -> None:
    """Train one model, and print its terms."""
    torch.manual_seed(0)
    model = build()
    shape = shape_of_module(model, name=build.__name__, seq_len=TOKENS)
    division = Division(
        partition_size=partition_size, num_replicas=dist.get_world_size() // partition_size, prefetch=1
    )
    expected = memory_terms(shape, division, Keeping(checkpoint=False), TOKENS).on_device()
    mics.shard(
        model, partition_size=partition_size, precision=mics.Precision(param_dtype=torch.bfloat16), prefetch=1
    )
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS))
    for _ in range(3):
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = mics.memory_report(model, show=False)
    for name in TERMS if dist.get_rank() == 0 else ():
        measured, predicted = report[name].measured or 0, report[name].predicted or 0
        cells = [f"{nbytes / 2**10:.1f}" for nbytes in (measured, expected[name], predicted)]
        error = f"{100 * (expected[name] / measured - 1):+.2f}%" if measured else "-"
        print(f"| {build.__name__} | {name} | {' | '.join(cells)} | {error} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--partition-size", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print("| model | term | measured KiB | planner KiB | mics.memory_report KiB | planner's error |")
        print("|---|---|---:|---:|---:|---:|")
    for build in (gpt, llama, tied_gpt2) if find_spec("transformers") else (gpt,):
        compare(build, args.partition_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
