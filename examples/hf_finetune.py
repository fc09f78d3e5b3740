"""Fine-tune a causal LM of transformers on a text file and export a Hugging Face folder.

Without --model a small Llama is built from scratch and the text is read as bytes: nothing is downloaded.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

import mics

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--text", type=Path, required=True, help="what to train on, as plain text")
parser.add_argument("--model", help="a name on the Hub or a folder, for from_pretrained")
parser.add_argument("--out", type=Path, default="runs/hf", help="the folder to export")
parser.add_argument("--length", type=int, default=256, help="tokens per sequence")
parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank and micro-batch")
parser.add_argument("--accumulation", type=int, default=2, help="micro-batches per optimizer step")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--lr", type=float, default=3e-4)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
is_first = dist.get_rank() == 0
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())

torch.manual_seed(0)
tokenizer = None
if args.model:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokens = tokenizer(args.text.read_text(), return_tensors="pt").input_ids[0]
else:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, bos_token_id=None, eos_token_id=None, pad_token_id=None, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()

# The whole model was in host memory just now. One that is too large for that: build it under
# torch.device("meta"), shard it, and mics.load(folder_of_safetensors, model): each rank reads its part.
mics.shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

blocks = list(tokens[: len(tokens) // args.length * args.length].view(-1, args.length))
num_train = len(blocks) * 9 // 10
train, held_out = blocks[:num_train], blocks[num_train:]
sampler = DistributedSampler(train, drop_last=True)  # every rank must run the same number of micro-batches
loader = DataLoader(train, args.batch_size * args.accumulation, sampler=sampler, drop_last=True)
eval_loader = DataLoader(held_out, args.batch_size, sampler=DistributedSampler(held_out, shuffle=False))


@torch.no_grad()
def evaluate(model: PreTrainedModel) -> float:
    """Mean loss over all ranks' shares of the held-out text."""
    model.eval()
    losses = [model(input_ids=ids.to(device), labels=ids.to(device)).loss.float() for ids in eval_loader]
    model.train()
    total = torch.stack(losses).mean()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def log(line: str) -> None:
    if is_first:
        print(line, flush=True)


log(f"before: eval_loss {evaluate(model):.4f}")
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for number, batch in enumerate(loader):
        for ids in mics.microsteps(model, batch.to(device).split(args.batch_size)):
            loss = model(input_ids=ids, labels=ids).loss / args.accumulation
            loss.backward()
        norm = mics.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % 10 == 0:
            log(f"epoch {epoch} step {number} loss {loss * args.accumulation:.4f} norm {norm:.3f}")
    log(f"epoch {epoch}: eval_loss {evaluate(model):.4f}")

# Whole tensors on rank 0; all ranks must call it. A model that does not fit in one machine's memory: call
# mics.save("checkpoint", model), and afterwards `mics checkpoint export checkpoint OUT --config FOLDER`.
weights = mics.full_state_dict(model)
if is_first:
    model.save_pretrained(args.out, state_dict=weights)
    if tokenizer is not None:
        tokenizer.save_pretrained(args.out)
    print(f"exported to {args.out}", flush=True)
dist.barrier()
dist.destroy_process_group()
