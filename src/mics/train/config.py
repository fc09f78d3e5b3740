"""Every setting of ``mics train``, with its meaning, its default and what it may be.

The docstrings under the fields are the text of ``mics train --help``. ``settings_file`` reads YAML.
"""

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final, Literal

import tyro

from mics.checkpoint.arguments import as_place
from mics.checkpoint.storage import Place
from mics.data.index import INDEX_FILE, TOKENIZER_FOLDER
from mics.errors import SettingsError
from mics.layout.compression import Compression, Hop2
from mics.models import GPTConfig
from mics.models.descriptions import ModelDescription, describe_model, describe_size
from mics.models.huggingface import check_weights, refuse_kind
from mics.utils.bounds import Bounds, check_bounds
from mics.utils.global_batch import MAX_TOKENS, AskedBatch
from mics.utils.numbers import TokenCount

METRICS_FILE: Final = "metrics.jsonl"
"""Measurements of a run, in its folder."""
_CAUSAL_SHARE: Final = 0.5
_MASKED_SHARE: Final = 0.2
"""Learning rate times width. BERT has 0.08, and RoBERTa 0.46 with batches of 8,000 sequences: with 0.5 the
loss of a small RoBERTa jumps near the peak, and gradient norms reach 26."""
_OF_SIZES: Final = ("num_layers", "num_heads", "hidden_size", "vocab_size", "dropout")

_FROM_0: Final = Bounds(least=0, most=10**9)
_FROM_1: Final = Bounds(least=1, most=10**9)
_SECONDS: Final = Bounds(least=1, most=10**8)


def _require(condition: bool, key: str, expected: str, found: object) -> None:
    if not condition:
        raise SettingsError(f"{key}: expected {expected}, found {found!r}")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model, as ``mics plan`` takes it too. Of a named size, single numbers may be replaced."""

    name: Annotated[str, tyro.conf.arg(aliases=["--model"])] = "nano"
    """A named size (nano, gpt-1.3b, roberta-10b, ...), a Hugging Face config.json or a folder with one (its
    safetensors are loaded), or module:function that builds an nn.Module."""
    objective: Literal["auto", "causal", "masked"] = "auto"
    """What to predict: the next token, or masked ones; auto: what the model is for."""
    from_scratch: bool = False
    """Begin with fresh weights, also where the model's folder has some."""
    num_layers: Annotated[int | None, Bounds(least=1, most=10**4)] = None
    """Transformer layers; unset takes the named size's."""
    num_heads: Annotated[int | None, Bounds(least=1, most=10**6)] = None
    """Attention heads; unset takes the named size's."""
    hidden_size: Annotated[int | None, Bounds(least=1, most=10**6)] = None
    """Hidden size (embedding width), a multiple of twice the heads; unset takes the named size's."""
    vocab_size: Annotated[int | None, Bounds(least=1, most=10**8)] = None
    """Vocabulary size, at least that of the data (256 for bytes); unset takes the named size's."""
    seq_len: Annotated[int | None, Bounds(least=1, most=10**8)] = None
    """Tokens per sequence; unset takes the model's."""
    dropout: float | None = None
    """Dropout probability, in [0, 1); unset takes the named size's."""

    def __post_init__(self) -> None:
        check_bounds(self, "model.")
        found = self.build()
        if found.objective is None:
            raise refuse_kind(found.title)
        _require(
            found.seq_len > 0, "model.seq_len", f"the tokens per sequence of {found.title}", self.seq_len
        )
        if found.weights is not None and not self.from_scratch:
            check_weights(found.weights)

    @property
    def title(self) -> str:
        """What a reader calls it: the named size, or that it is another."""
        return self.build().title

    @property
    def weights(self) -> Path | None:
        """The folder whose weights the run begins with."""
        return None if self.from_scratch else self.build().weights

    @property
    def beginning(self) -> str:
        """What a run begins with, as its header says it."""
        return "fresh weights" if self.weights is None else f"weights of {self.weights}"

    def build(self) -> ModelDescription:
        """The full description of the model."""
        objective = None if self.objective == "auto" else self.objective
        found = describe_model(self.name, objective=objective)
        if found.gpt is not None:
            return describe_size(self.name, self._changed(found.gpt))
        for name in _OF_SIZES:
            if getattr(self, name) is not None:
                raise SettingsError(
                    f"model.{name}: expected it unset beside --model {self.name}, found "
                    f"{getattr(self, name)!r}; leave it out and change {found.where}"
                )
        if self.seq_len is None:
            return found
        _require(
            not 0 < found.seq_len < self.seq_len,
            "model.seq_len",
            f"at most the {found.seq_len} positions of {found.title}",
            self.seq_len,
        )
        return replace(found, seq_len=self.seq_len)

    def _changed(self, base: GPTConfig) -> GPTConfig:
        values = {
            name: getattr(base, name) if getattr(self, name, None) is None else getattr(self, name)
            for name in GPTConfig.__dataclass_fields__
        }
        try:
            return GPTConfig(**values)
        except ValueError as error:
            raise SettingsError(f"model.{error}") from None


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What to train on: a text, whose bytes are the tokens, or shards that mics data prepare has made."""

    text: Path | None = None
    """Text file to train on; unset takes the fables that ship with mics."""
    validation_share: float = 0.1
    """Fraction of the text, taken from its end, that is held out for validation. Shards have their own."""
    shards: tuple[Path, ...] = ()
    """Folders that mics data prepare has made, instead of a text; several are mixed."""
    weights: tuple[float, ...] = ()
    """Share of the sequences that each folder gives, in any unit; unset takes all of them equally often."""
    verify: bool = False
    """Read all shards and compare their digests before training, also of folders above 250 MB. Sizes are
    always compared."""

    def __post_init__(self) -> None:
        share = self.validation_share
        _require(0.0 < share < 1.0, "data.validation_share", "a number between 0 and 1", share)
        _require(self.text is None or self.text.is_file(), "data.text", "a file that exists", str(self.text))
        if self.text is not None and self.shards:
            raise SettingsError("data.text, data.shards: expected one of them, found both; leave one out")
        if self.weights:
            fit = len(self.weights) == len(self.shards)
            _require(fit, "data.weights", f"one for each of {len(self.shards)} data.shards", self.weights)
            positive = all(0 < weight < math.inf for weight in self.weights)
            _require(positive, "data.weights", "numbers above 0", self.weights)

    def check_prepared(self) -> None:
        """Raise if shards are not there. Settings may be written, and a cluster examined, before they are."""
        missing = self.missing_shards
        _require(
            not missing,
            "data.shards",
            f"folders that mics data prepare has made, with {INDEX_FILE}",
            ", ".join(map(str, missing)),
        )

    @property
    def missing_shards(self) -> tuple[Path, ...]:
        """Folders that have no shards on this host."""
        return tuple(folder for folder in self.shards if not (folder / INDEX_FILE).is_file())

    @property
    def tokenizer_folder(self) -> Path | None:
        """The tokenizer's files, which belong beside an exported model; None where bytes are the tokens."""
        folder = self.shards[0] / TOKENIZER_FOLDER if self.shards else None
        return folder if folder is not None and folder.is_dir() else None


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW, with linear warm-up and cosine decay of the learning rate."""

    learning_rate: Annotated[float | None, Bounds(above=0, most=1000)] = None
    """Peak learning rate, after the warm-up; unset is 0.5 / hidden size, since wider models need less, and
    0.2 / hidden size of a masked language model."""
    final_share: Annotated[float, Bounds(least=0, most=1)] = 0.1
    """Final learning rate as a fraction of the peak."""
    warmup_steps: Annotated[int, _FROM_0] = 15
    """Linear warm-up steps."""
    beta1: Annotated[float, Bounds(least=0, below=1)] = 0.9
    """AdamW beta1."""
    beta2: Annotated[float, Bounds(least=0, below=1)] = 0.95
    """AdamW beta2."""
    weight_decay: Annotated[float, Bounds(least=0, most=1000)] = 0.1
    """AdamW weight decay, of matrices only; norms are not decayed."""
    max_grad_norm: Annotated[float, Bounds(above=0)] = 1.0
    """Gradient clipping: maximum global norm."""
    nonfinite: Literal["stop", "skip", "ignore"] = "stop"
    """On NaN or infinite gradients: end the run, skip the step, or step anyway."""
    max_skipped: Annotated[int, _FROM_0] = 10
    """With nonfinite=skip: consecutive skipped steps after which the run ends anyway."""

    def __post_init__(self) -> None:
        check_bounds(self, "optimizer.")


@dataclass(frozen=True, kw_only=True)
class ShardingSettings:
    """How the model is sharded over the ranks."""

    partition_size: Annotated[int | None, _FROM_1] = None
    """Ranks that one copy of the parameters is sharded over; unset takes the smallest that leaves half of the
    GPU's memory to activations (without a GPU: one node)."""
    optimizer_sharding: Literal["auto", "world", "partition"] = "world"
    """Shard optimizer state over all ranks, or over the partition group only; auto: the latter where the cost
    model says that it saves time and memory allows it."""
    optimizer_state: Literal["device", "host"] = "device"
    """Where master weights and optimizer state are between steps; host: in pinned memory, for some time."""
    lossless_refresh: bool = True
    """Send new parameters to the replicas as how far each has moved: the same bits in fewer bytes."""
    hop2: Hop2 | None = None
    """Round gradients between replicas to this format; int8 and int4 have a scale for each 64 values."""
    hop2_error_feedback: bool = True
    """With hop2: keep what rounding loses, and send it in later steps."""
    inter_gather: Literal["int8"] | None = None
    """Round parameters that a partition group sends from node to node."""
    inter_reduce: Literal["int8"] | None = None
    """Round gradients that a partition group sends from node to node."""
    cluster: str | None = None
    """Cluster that the cost model reckons with: a name of mics plan, or a file. MICS_CLUSTER and a
    cluster.yaml that mics calibrate left beside the settings come first; unset: what the device suggests."""
    units: Literal["blocks", "parts"] = "blocks"
    """What is unsharded as a whole: blocks, or parts of them (attention, MLP), which takes less memory."""
    prefetch: Annotated[int | None, _FROM_0] = None
    """Units to unshard ahead of their use; unset: as many as hide the all-gathers and fit into memory."""
    param_dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Dtype of parameters and activations; auto is bf16 on GPUs and fp32 on CPUs. Master weights are fp32.
    fp16 scales the loss, and leaves out updates that overflow (torch.amp.GradScaler)."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of the reduce-scatter inside the partition group; gradients are accumulated in fp32."""
    replica_reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of the gradient reduction between replicas, once per step; gradients are summed in fp32."""
    activations: Literal["keep", "checkpoint", "offload"] = "keep"
    """Keep activations; recompute them (activation checkpointing); or recompute them and offload the inputs
    of blocks to the CPU."""

    def __post_init__(self) -> None:
        check_bounds(self, "sharding.")
        one_format = self.hop2 is None or self.replica_reduce_dtype == "fp32"
        expected = f"fp32 with hop2={self.hop2}, which is the format of the same gradients"
        _require(one_format, "sharding.replica_reduce_dtype", expected, self.replica_reduce_dtype)

    @property
    def compression(self) -> Compression:
        return Compression(
            refresh="lossless" if self.lossless_refresh else None,
            hop2=self.hop2,
            hop2_error_feedback=self.hop2_error_feedback,
            inter_gather=self.inter_gather,
            inter_reduce=self.inter_reduce,
        )


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """What is measured and printed during training."""

    progress: Literal["auto", "lines", "none"] = "auto"
    """auto: a live display in a terminal, a plain line every few seconds elsewhere; lines: plain lines
    always; none: no progress."""
    logger: Annotated[Literal["none", "tensorboard", "wandb"], tyro.conf.arg(aliases=["--logger"])] = "none"
    """Where measurements go besides metrics.jsonl: TensorBoard events in <output-dir>/<name>/tensorboard, or
    Weights & Biases."""
    profile: Annotated[int, tyro.conf.arg(aliases=["--profile"]), Bounds(least=0, most=10**6)] = 0
    """Optimizer steps to profile after the first two (mics.profile): a table, and a timeline and a trace in
    <output-dir>/<name>/profile; 0 for none."""
    exposure_interval: Annotated[int, _FROM_0] = 1000
    """Steps between measurements of exposed communication, each over two steps; 0 for none."""
    interval: Annotated[int, _FROM_1] = 5
    """Steps between measurements, whose loss and speeds are means over these steps. Nothing synchronizes with
    the GPU between them."""
    eval_interval: Annotated[int, _FROM_0] = 30
    """Steps between validations; 0 validates only at the end."""
    eval_batches: Annotated[int, Bounds(least=1, most=10**6)] = 2
    """Batches per rank and validation."""
    sample_tokens: Annotated[int, Bounds(least=0, most=10**6)] = 200
    """Tokens to sample from the trained model; 0 for none."""
    prompt: str = "There was once a "
    """Prompt of the sample."""
    temperature: Annotated[float, Bounds(least=0, most=1000)] = 0.7
    """Sampling temperature; 0 is greedy."""
    save_weights: bool = True
    """Write the trained weights: of models of transformers the folder hf, which from_pretrained loads, of
    others model.pt, an ordinary state dict of full tensors."""

    def __post_init__(self) -> None:
        check_bounds(self, "report.")
        _require(bool(self.prompt), "report.prompt", "at least one character", self.prompt)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Checkpoints to resume from."""

    folder: str | None = None
    """Folder of this run's checkpoints: a path that all nodes share, or a URL of an object store, such as
    s3://bucket/run. Unset is <output-dir>/<name>/checkpoints."""
    interval: Annotated[int, _FROM_0] = 100
    """Steps between checkpoints; 0 disables them, and with them restarts and the save at SIGTERM."""
    keep: Annotated[int, _FROM_1] = 2
    """Number of checkpoints to keep; older ones are removed."""
    asynchronous: bool = True
    """Write in the background: training pauses only while values are copied to host memory."""
    resume: str = "auto"
    """auto: resume if the launcher restarted this run, else start anew (checkpoints of an earlier run of this
    name move to checkpoints.previous); latest: resume from this run's latest checkpoint if there is one; or
    the path or URL of a checkpoint to resume from."""

    def __post_init__(self) -> None:
        check_bounds(self, "checkpoint.")
        _require(self.folder != "", "checkpoint.folder", "a path or a URL", self.folder)
        _require(bool(self.resume), "checkpoint.resume", "auto, latest or a path", self.resume)


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """The ranks to start, on this machine or with --nodes on several. Under torchrun they are torchrun's."""

    dry_run: Annotated[bool, tyro.conf.arg(aliases=["--dry-run"])] = False
    """Print units, layout, memory per rank and bytes per step, and leave. Nothing is started."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes the GPUs if there are any."""
    hosts: Annotated[int | None, tyro.conf.arg(aliases=["--nodes"]), Bounds(least=1, most=100_000)] = None
    """Hosts to train on, of which this one is the first: prints the torchrun command to run on the others."""
    simulated_nodes: Annotated[int | None, Bounds(least=1, most=1024)] = None
    """Nodes to simulate on this machine; unset is 1 on a machine with several GPUs, else 2."""
    ranks_per_node: Annotated[int | None, Bounds(least=1, most=1024)] = None
    """Ranks per node; unset is one per GPU with several GPUs, else 2. With --nodes: one per GPU, or one."""
    ranks_per_gpu: Annotated[int | None, Bounds(least=1, most=1024)] = None
    """Ranks per GPU; unset is as few as possible."""
    timeout_seconds: Annotated[int, _SECONDS] = 300
    """Timeout of collectives in seconds."""
    max_restarts: Annotated[int | None, _FROM_0] = None
    """Restarts of all ranks after failures; unset is 3 with checkpoints, else 0."""
    address: str | None = None
    """With --nodes: address of this host that the others can reach; unset is that of the default route."""
    port: Annotated[int, Bounds(least=1, most=65535)] = 29500
    """With --nodes: port on this host where the hosts meet."""
    join_seconds: Annotated[int, _SECONDS] = 300
    """With --nodes: how long to wait for the other hosts, at the start and after one was lost."""

    def __post_init__(self) -> None:
        check_bounds(self, "launch.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a language model on a text with mics.

    Without a launcher this starts its own ranks: one per GPU on a machine with several GPUs, otherwise four
    that simulate two nodes of two. With --nodes it starts those of this host with torchrun, and prints the
    command for the others. Under torchrun (or anything like it) it runs as the rank it is.
    """

    config: Path | None = None
    """YAML file with settings under the same names; command-line flags override it."""
    name: str = "demo"
    """Name of the run. Its results replace those of an earlier run of the same name, unless it resumes from
    a checkpoint of it. Checkpoints are not replaced: they move aside."""
    output_dir: Path = Path("runs")
    """Folder for the results: they go to <output-dir>/<name>."""
    steps: Annotated[int, _FROM_1] = 120
    """Optimizer steps."""
    micro_steps: Annotated[int | None, Bounds(least=1, most=10**6)] = None
    """Gradient accumulation steps; unset is 2, or as many as the global batch needs."""
    batch_size: Annotated[int, Bounds(least=1, most=10**6)] = 4
    """Sequences per rank and micro-step."""
    global_batch: int | None = None
    """Sequences per optimizer step, over all ranks, instead of micro_steps."""
    global_batch_tokens: TokenCount | None = None
    """Tokens per optimizer step, over all ranks (1M, 4e6, 4_000_000), instead of micro_steps: rounded to a
    whole number of gradient accumulation steps."""
    seed: Annotated[int, Bounds(least=0, most=2**64 - 1)] = 0
    """Random seed of weights, batches and sample."""
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    sharding: ShardingSettings = field(default_factory=ShardingSettings)
    report: ReportSettings = field(default_factory=ReportSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.batch.given and self.micro_steps is not None:
            raise SettingsError(
                "micro_steps, global_batch: expected one of them, found both; leave micro_steps out, it "
                "follows from the global batch"
            )
        model = self.model.build()
        self.batch.check_size(model.seq_len)
        tokens = self.batch_size * (self.micro_steps or 1) * model.seq_len
        _require(
            tokens <= MAX_TOKENS,
            "batch_size, micro_steps",
            f"at most {MAX_TOKENS:,} tokens of a rank per step",
            tokens,
        )
        size = model.vocab_size
        enough = self.data.shards or size == 0 or size >= 256
        _require(bool(enough), "model.vocab_size", "at least 256 (the data is bytes)", size)
        _require(
            self.name not in ("", ".", "..")
            and not {"/", "\0"} & set(self.name)
            and len(os.fsencode(self.name)) < 256,
            "name",
            "a plain folder name",
            self.name,
        )

    @property
    def batch(self) -> AskedBatch:
        """The global batch that was asked for, if one was."""
        return AskedBatch(
            sequences=self.global_batch, tokens=self.global_batch_tokens, setting="global_batch"
        )

    @property
    def learning_rate(self) -> float:
        """The highest learning rate, given or derived."""
        given, model = self.optimizer.learning_rate, self.model.build()
        if given is not None:
            return given
        return (_MASKED_SHARE if model.objective == "masked" else _CAUSAL_SHARE) / model.hidden_size

    @property
    def run_dir(self) -> Path:
        """Folder of this run's results."""
        return self.output_dir / self.name

    @property
    def checkpoint_dir(self) -> Place:
        """Folder of this run's checkpoints."""
        given = self.checkpoint.folder
        return self.run_dir / "checkpoints" if given is None else as_place(given, "checkpoint.folder")

    @property
    def max_restarts(self) -> int:
        """Restarts by our own launcher, given or derived."""
        given = self.launch.max_restarts
        return (3 if self.checkpoint.interval else 0) if given is None else given
