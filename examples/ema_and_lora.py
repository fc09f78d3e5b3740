"""LoRA adapters on a frozen causal LM, with an exponential moving average of the adapters for evaluation.

--model takes a name on the Hub or a folder, of a model with nn.Linear layers (Llama, Qwen, Mistral, ...; not
GPT-2). Without it the frozen model is a random one, and the text is read as bytes.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import mics

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--text", type=Path, required=True)
parser.add_argument("--model", help="a name on the Hub or a folder, for from_pretrained")
parser.add_argument("--out", type=Path, default="runs/lora")
numbers = {"steps": 200, "batch-size": 8, "length": 128, "lr": 1e-3, "decay": 0.99}
for name, default in numbers.items():  # batch-size: per rank; decay: of the moving average
    parser.add_argument(f"--{name}", type=type(default), default=default, help=" ")
args = parser.parse_args()


class LoRA(nn.Module):
    """A frozen linear layer plus a trained update of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 8, alpha: float = 16.0) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.lora_b(self.lora_a(x))


device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())

torch.manual_seed(0)
if args.model:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    text = AutoTokenizer.from_pretrained(args.model)(args.text.read_text(), return_tensors="pt").input_ids[0]
else:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **sizes))
    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
model.requires_grad_(False)
for parent in list(model.base_model.modules()):
    for name, child in list(parent.named_children()):
        if isinstance(child, nn.Linear):
            setattr(parent, name, LoRA(child))

mics.shard(model)  # after the adapters are in place; frozen parameters have no gradients or optimizer state
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=args.lr)
if resume := (args.out / "trained").exists():
    mics.load(args.out / "ema", model)
ema = [p.detach().clone() for p in trained]  # each rank averages the elements that it holds
step = mics.load(args.out / "trained", model, optimizer)["step"] if resume else 0


@contextmanager  # inside, the model has the averaged adapters
def averaged() -> Iterator[None]:
    now = [p.detach().clone() for p in trained]
    try:
        for p, mean in zip(trained, ema, strict=True):
            p.data.copy_(mean)
        yield
    finally:
        for p, value in zip(trained, now, strict=True):
            p.data.copy_(value)


def batch(source: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(source) - args.length, (args.batch_size,), generator=generator)
    return torch.stack([source[i : i + args.length] for i in starts.tolist()]).to(device)


@torch.no_grad()
def evaluate() -> float:
    ids = batch(held_out, 0)  # every rank evaluates its share
    dist.all_reduce(loss := model(input_ids=ids, labels=ids).loss.float())
    return loss.item() / dist.get_world_size()


train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
while step < args.steps:
    ids = batch(train, 100 + step)
    model(input_ids=ids, labels=ids).loss.backward()
    mics.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    for mean, p in zip(ema, trained, strict=True):
        mean.lerp_(p.detach(), 1 - args.decay)
    step += 1
    if step % 50 == 0 or step == args.steps:
        loss = evaluate()
        with averaged():
            ema_loss = evaluate()
        if dist.get_rank() == 0:
            print(f"step {step} eval_loss {loss:.4f} ema_eval_loss {ema_loss:.4f}", flush=True)

mics.save(args.out / "trained", model, optimizer, {"step": step})
with averaged():
    mics.save(args.out / "ema", model)
    adapters = {name: t for name, t in mics.full_state_dict(model).items() if "lora_" in name}
if dist.get_rank() == 0:
    save_file(adapters, args.out / "adapters.safetensors")
dist.destroy_process_group()
