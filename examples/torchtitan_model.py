"""Train a model of torchtitan, with its tokenizer, data and loss; resume on any number of ranks.

torchtitan's loader divides a text among ranks, and its state fits that number of ranks alone. So there is a
fixed number of --streams here: a rank reads some of them, one micro-batch of each per step.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import load_dataset
from tokenizers import ByteLevelBPETokenizer
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

import mics

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--text", type=Path, required=True, help="what to train on, one document per line")
parser.add_argument("--tokenizer", type=Path, help="a folder with tokenizer.json; by default one is trained")
parser.add_argument("--out", type=Path, default="runs/torchtitan")
parser.add_argument("--flavor", default="debugmodel", help="of torchtitan's llama3")
parser.add_argument("--partition-size", type=int, help="ranks that hold one copy of the parameters")
parser.add_argument("--streams", type=int, default=8, help="of the data: a multiple of the number of ranks")
parser.add_argument("--batch-size", type=int, default=4, help="sequences per micro-batch")
parser.add_argument("--length", type=int, default=256, help="tokens per sequence")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--interval", type=int, default=10, help="steps between checkpoints")
parser.add_argument("--lr", type=float, default=8e-4)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
assert args.streams % world == 0, f"--streams must be a multiple of {world}"

# -- torchtitan's tokenizer and data ------------------------------------------------------------------------
tokenizer_folder = args.tokenizer or args.out / "tokenizer"
if args.tokenizer is None and rank == 0 and not tokenizer_folder.exists():
    trained = ByteLevelBPETokenizer()
    trained.train([str(args.text)], vocab_size=2048, special_tokens=["<s>", "</s>"])
    tokenizer_folder.mkdir(parents=True)
    trained.save(str(tokenizer_folder / "tokenizer.json"))
    (tokenizer_folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
dist.barrier()
tokenizer = HuggingFaceTokenizer(tokenizer_path=str(tokenizer_folder))
DATASETS["text"] = DatasetConfig(
    path=str(args.text),
    loader=lambda path: load_dataset("text", data_files=path, split="train"),
    sample_processor=lambda line: line["text"],
)
data = HuggingFaceTextDataLoader.Config(dataset="text")
sizes = {"seq_len": args.length, "local_batch_size": args.batch_size}
own = range(rank, args.streams, world)
streams = [data.build(dp_world_size=args.streams, dp_rank=i, tokenizer=tokenizer, **sizes) for i in own]

# -- torchtitan's model -------------------------------------------------------------------------------------
config = model_registry(args.flavor).model
for layer in config.layers:
    layer.attention.rope = replace(layer.attention.rope, max_seq_len=args.length)
    if device == "cpu":  # torch has no backward of flex attention there: documents see the ones before
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
torch.manual_seed(0)
model = config.build().to(device)
model.init_states()
dtype = torch.bfloat16 if device == "cuda" else torch.float32  # masters stay float32
mics.shard(model, partition_size=args.partition_size, precision=mics.Precision(param_dtype=dtype))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)

step = 0
if (args.out / "latest").exists():
    state = mics.load(args.out, model, optimizer)
    step = state["step"]
    for i, stream in zip(own, streams, strict=True):
        stream.load_state_dict(state["streams"][i])

batches = [iter(stream) for stream in streams]
is_masked = isinstance(config.layers[0].attention.inner_attention, FlexAttention.Config)
while step < args.steps:
    total = torch.zeros((), device=device)
    for inputs, labels in mics.microsteps(model, [next(batch) for batch in batches]):
        tokens, positions = inputs["input"].to(device), inputs["positions"].to(device)
        masks = model.get_attention_masks(positions) if is_masked else None
        logits = model(tokens, positions, masks)
        loss = cross_entropy_loss(logits, labels.to(device)) / labels.numel() / len(streams)
        loss.backward()
        total += loss.detach() / world
    norm = mics.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    step += 1
    if rank == 0:
        print(f"step {step} loss {total:.6f} norm {norm:.6f}", flush=True)
    if step % args.interval == 0 or step == args.steps:
        states: list = [None] * world
        dist.all_gather_object(states, {i: s.state_dict() for i, s in zip(own, streams, strict=True)})
        every = {i: state for states_of_rank in states for i, state in states_of_rank.items()}
        mics.save(args.out, model, optimizer, {"step": step, "streams": every}, step=step, keep=2)
dist.destroy_process_group()
