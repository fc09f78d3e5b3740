"""Every setting of ``mics train``, with its meaning, its default and what it may be.

The docstrings under the fields are the text of ``mics train --help``. ``settings_file`` reads YAML.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mics.errors import SettingsError
from mics.models import GPT_SIZES, GPTConfig

# Written out because a type checker and ``--help`` need it; a test holds it equal to the table of sizes.
ModelSize = Literal["nano", "gpt-124m", "gpt-350m", "gpt-1.3b", "gpt-3.6b", "gpt-6.7b", "gpt-13b"]


def _require(condition: bool, key: str, expected: str, found: object) -> None:
    if not condition:
        raise SettingsError(f"{key}: expected {expected}, found {found!r}")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model: a named size, of which single numbers may be replaced."""

    size: ModelSize = "nano"
    """Named size to start from."""
    num_layers: int | None = None
    """Transformer blocks; unset takes the named size's."""
    num_heads: int | None = None
    """Attention heads; unset takes the named size's."""
    hidden_size: int | None = None
    """Width of the model, a multiple of twice the heads; unset takes the named size's."""
    vocab_size: int | None = None
    """Number of different tokens, at least 256 since the data is bytes; unset takes the named size's."""
    seq_len: int | None = None
    """Tokens in one sequence; unset takes the named size's."""
    dropout: float | None = None
    """Share of activations dropped while training, in [0, 1); unset takes the named size's."""

    def __post_init__(self) -> None:
        config = self.build()
        _require(
            config.vocab_size >= 256,
            "model.vocab_size",
            "at least 256 (the data is bytes)",
            config.vocab_size,
        )

    @property
    def name(self) -> str:
        """What a reader calls it: the named size, or that it is another."""
        return self.size if self.build() == GPT_SIZES[self.size] else f"{self.size} (changed)"

    def build(self) -> GPTConfig:
        """The full description of the model."""
        base = GPT_SIZES[self.size]
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
    """The text to learn, read as bytes."""

    text: Path | None = None
    """Text file to train on; unset takes the fables that ship with mics."""
    validation_share: float = 0.1
    """Share of the text, taken from its end, that is kept for validation."""

    def __post_init__(self) -> None:
        share = self.validation_share
        _require(0.0 < share < 1.0, "data.validation_share", "a number between 0 and 1", share)
        _require(self.text is None or self.text.is_file(), "data.text", "a file that exists", str(self.text))


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW, with a learning rate that warms up linearly and then falls along a cosine."""

    learning_rate: float | None = None
    """Highest learning rate, after the warm-up; unset is 0.5 / hidden size, as wider models want less."""
    final_share: float = 0.1
    """Learning rate of the last step as a share of the highest."""
    warmup_steps: int = 15
    """Steps over which the learning rate rises from zero."""
    beta1: float = 0.9
    """Memory of the gradient's mean."""
    beta2: float = 0.95
    """Memory of the gradient's square."""
    weight_decay: float = 0.1
    """Decay of the matrices; norms are not decayed."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    nonfinite: Literal["stop", "skip", "ignore"] = "stop"
    """Gradients with a NaN or an infinity: end the run, leave out the update, or update all the same."""
    max_skipped: int = 10
    """With nonfinite=skip: updates left out one after the other before the run ends all the same."""

    def __post_init__(self) -> None:
        _require(self.max_skipped >= 0, "optimizer.max_skipped", "0 or more", self.max_skipped)
        for name in ("learning_rate", "max_grad_norm"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"optimizer.{name}", "a number above 0", value)
        for name in ("warmup_steps", "weight_decay"):
            _require(getattr(self, name) >= 0, f"optimizer.{name}", "0 or more", getattr(self, name))
        for name in ("beta1", "beta2"):
            _require(
                0 <= getattr(self, name) < 1, f"optimizer.{name}", "a number in [0, 1)", getattr(self, name)
            )
        _require(0 <= self.final_share <= 1, "optimizer.final_share", "a number in [0, 1]", self.final_share)


@dataclass(frozen=True, kw_only=True)
class ShardingSettings:
    """How the model is divided over the ranks."""

    partition_size: int | None = None
    """Ranks that together hold one copy of the parameters; unset takes the smallest group that leaves half of
    a GPU to activations (without a GPU: one node)."""
    optimizer_sharding: Literal["world", "partition"] = "world"
    """Divide optimizer state over all ranks, or over the partition group only."""
    param_dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """dtype of parameters and activations; auto is bf16 on GPUs and fp32 on CPUs. Masters are fp32."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """dtype in which gradients travel inside a partition group; they are accumulated in fp32."""
    replica_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """dtype in which gradients travel between replicas, once a step; they are added up in fp32."""
    activations: Literal["keep", "checkpoint", "offload"] = "keep"
    """Keep what blocks save for the backward, compute it again, or that with their inputs in host memory."""

    def __post_init__(self) -> None:
        size = self.partition_size
        _require(size is None or size >= 1, "sharding.partition_size", "at least 1", size)


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """What is measured and shown on the way."""

    interval: int = 5
    """Steps between two measurements. Between them nothing waits for the GPU."""
    eval_interval: int = 30
    """Steps between two validations; 0 validates only at the end."""
    eval_batches: int = 2
    """Batches on every rank for one validation."""
    sample_tokens: int = 200
    """Length of the text sampled from the trained model; 0 for none."""
    prompt: str = "There was once a "
    """Beginning of the sampled text."""
    temperature: float = 0.7
    """Below 1 the sample is safer, above 1 wilder; 0 always takes the likeliest."""
    save_weights: bool = True
    """Write the trained weights to model.pt: an ordinary state dict of full tensors."""

    def __post_init__(self) -> None:
        for name in ("interval", "eval_batches"):
            _require(getattr(self, name) >= 1, f"report.{name}", "at least 1", getattr(self, name))
        for name in ("eval_interval", "sample_tokens", "temperature"):
            _require(getattr(self, name) >= 0, f"report.{name}", "0 or more", getattr(self, name))
        _require(bool(self.prompt), "report.prompt", "at least one character", self.prompt)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """What a run can go on from. Checkpoints go to <output-dir>/<name>/checkpoints."""

    interval: int = 100
    """Steps between two checkpoints; with 0 there are none, and neither restarts nor a save at SIGTERM."""
    keep: int = 2
    """Checkpoints that stay; older ones are removed."""
    asynchronous: bool = True
    """Write while training goes on: it stands still only while the values are copied to host memory."""
    resume: str = "auto"
    """auto: go on where this run was if the launcher restarted it, else begin anew; latest: go on from this
    run's latest checkpoint if there is one; or the path of a checkpoint to go on from."""

    def __post_init__(self) -> None:
        _require(self.interval >= 0, "checkpoint.interval", "0 or more", self.interval)
        _require(self.keep >= 1, "checkpoint.keep", "at least 1", self.keep)
        _require(bool(self.resume), "checkpoint.resume", "auto, latest or a path", self.resume)


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """The ranks that are started on this machine. Under torchrun the ranks are torchrun's."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes the GPUs if there are any."""
    nodes: int | None = None
    """Nodes to play; unset is 1 on a machine with several GPUs, else 2."""
    ranks_per_node: int | None = None
    """Ranks of each node; unset is one for each GPU with several GPUs, else 2."""
    ranks_per_gpu: int | None = None
    """Ranks that share one GPU; unset is as few as possible."""
    timeout_seconds: int = 300
    """A collective that waits longer than this fails instead of hanging."""
    max_restarts: int | None = None
    """Times that all ranks are started again after a failure; unset is 3 with checkpoints, else 0."""

    def __post_init__(self) -> None:
        restarts = self.max_restarts
        _require(restarts is None or restarts >= 0, "launch.max_restarts", "0 or more", restarts)
        for name in ("nodes", "ranks_per_node", "ranks_per_gpu", "timeout_seconds"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"launch.{name}", "at least 1", value)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a GPT on a text with mics.

    Without a launcher this starts its own ranks: on a machine with several GPUs one for each, otherwise four
    that play two nodes of two. Under torchrun (or anything like it) it runs as the rank it is.
    """

    config: Path | None = None
    """YAML file with settings under the same names; flags given here win over the file."""
    name: str = "demo"
    """Name of the run. Its results replace those of an earlier run of the same name, unless it goes on from
    a checkpoint of it."""
    output_dir: Path = Path("runs")
    """Folder for the results: they go to <output-dir>/<name>."""
    steps: int = 120
    """Optimizer steps."""
    micro_steps: int = 2
    """Forwards and backwards before each optimizer step."""
    batch_size: int = 4
    """Sequences on each rank in each micro-step."""
    seed: int = 0
    """Seed of the weights, of the batches and of the sample."""
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    sharding: ShardingSettings = field(default_factory=ShardingSettings)
    report: ReportSettings = field(default_factory=ReportSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)

    def __post_init__(self) -> None:
        for name in ("steps", "micro_steps", "batch_size"):
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        _require(self.seed >= 0, "seed", "0 or more", self.seed)
        _require(
            self.name not in ("", ".", "..") and "/" not in self.name,
            "name",
            "a plain folder name",
            self.name,
        )

    @property
    def learning_rate(self) -> float:
        """The highest learning rate, given or derived."""
        given = self.optimizer.learning_rate
        return 0.5 / self.model.build().hidden_size if given is None else given

    @property
    def run_dir(self) -> Path:
        """Folder of this run's results."""
        return self.output_dir / self.name

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of this run's checkpoints."""
        return self.run_dir / "checkpoints"

    @property
    def max_restarts(self) -> int:
        """Restarts by our own launcher, given or derived."""
        given = self.launch.max_restarts
        return (3 if self.checkpoint.interval else 0) if given is None else given
