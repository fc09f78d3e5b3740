"""The training loop: join the ranks, build and shard the model, train, then show what came of it."""

import os
import sys
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

import mics
from mics.comm import join_world
from mics.data.index import read_index
from mics.data.prefetching import Prefetcher
from mics.engine import engine_of
from mics.errors import SettingsError
from mics.integrations.weights import is_of_transformers
from mics.models.sampling import sample_tokens
from mics.train.board import Board
from mics.train.checkpoints import Checkpoints, Resumed
from mics.train.cluster_beside import use_cluster_beside
from mics.train.config import TrainConfig
from mics.train.data import Batches, Dealing
from mics.train.display import Display, RankConsole, Show
from mics.train.export import export_folder
from mics.train.exposure import ExposureMeter
from mics.train.folders import only_run_of_ranks
from mics.train.hardware import calibrated_tflops, peak_tflops
from mics.train.learning_rate import learning_rate_share
from mics.train.metrics import Meter, Speedometer, mean_over_ranks, sent_bytes
from mics.train.model import BuiltModel, build_model
from mics.train.nonfinite import NonfinitePolicy
from mics.train.objective import LanguageModelling
from mics.train.ranks import Rank, joined
from mics.train.results import History, show_results, write_results
from mics.train.sample import prompt_tokens
from mics.train.sequences import NO_VALIDATION, TensorPair, open_together
from mics.train.setup import Setup, describe_run
from mics.train.sharding import PrefetchNews, describe_choices
from mics.train.stopping import LEFT_CODE, Stopping
from mics.utils.progress import is_live


def run_rank(config: TrainConfig) -> int:
    """Train as the rank this process is. Every rank does the same; only rank 0 shows and writes anything.

    Returns the exit code: 0, or that of a run that was asked to leave, and saved.
    """
    with joined(config.launch) as me, only_run_of_ranks(config, me), _stopping(config, me) as stop:
        console = RankConsole(quiet=me.rank != 0)
        with console.showing_log():
            beside = use_cluster_beside(config, join_world(), me.device)
            if beside is not None:
                console.print(beside, markup=False)
            run, resumed = _prepare(config, me, console)
            console.print(describe_run(config, run.setup, run.dealing), markup=False)
            for line in describe_choices(run.model, config.sharding):
                console.print(line, markup=False)
            if not run.batches.sequences.has_validation:
                console.print(NO_VALIDATION, markup=False)
            history, last_step = _train(run, resumed, console, stop)
            if last_step < config.steps:
                _leave(run, console, last_step, saved_step=resumed.step if resumed.own else -1)
                return LEFT_CODE
            _finish(run, console, history)
    run.checkpoints.end_job()  # after all ranks have come to the end
    return 0


def _stopping(config: TrainConfig, me: Rank) -> AbstractContextManager[Stopping | None]:
    """Leaving in order at SIGTERM; a run without checkpoints has nothing to leave in order for."""
    if not config.checkpoint.interval:
        return nullcontext()
    return Stopping(rank=me.rank, num_ranks=me.num_ranks, step=0)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Everything the loop works with."""

    config: TrainConfig
    me: Rank
    dealing: Dealing
    setup: Setup
    model: nn.Module
    objective: LanguageModelling
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    batches: Batches
    meter: Meter
    nonfinite: NonfinitePolicy
    checkpoints: Checkpoints


def _prepare(config: TrainConfig, me: Rank, console: Console) -> tuple[_Run, Resumed]:
    """Build everything, and take it to where the run goes on."""
    shape = config.model.build()
    sequences = open_together(config, me)
    prompt_tokens(config, sequences)  # what is wrong with the prompt is an error now, not when all is trained
    built = build_model(config, rank=me.rank)
    model = built.model
    optimizer = _build_optimizer(model, config, decayed=built.matrices)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _learning_rate(config))
    scales = config.sharding.param_dtype == "fp16"
    scaler = torch.amp.GradScaler(me.device.type, enabled=scales)
    nonfinite = NonfinitePolicy(config.optimizer, model, optimizer, scaler)
    setup = Setup.of(model)
    meter = _meter(built, setup, me)
    checkpoints = Checkpoints(
        config,
        me,
        model=model,
        optimizer=optimizer,
        parts={"scheduler": scheduler, "meter": meter, "nonfinite": nonfinite},
        data_digest=sequences.digest(),
        tokenizer=sequences.tokenizer,
        tell=lambda text: console.print(text, markup=False),
    )
    resumed = checkpoints.resume()
    if resumed.folder is None:
        _begin_weights(config, model, console)
    dealing = Dealing.asked(config, num_ranks=me.num_ranks, before=resumed.dealing)
    checkpoints.dealing = dealing
    meter.tokens_per_step = dealing.num_sequences * shape.seq_len
    run = _Run(
        config=replace(
            config,
            batch_size=dealing.batch_size,
            micro_steps=dealing.micro_steps,
            global_batch=None,
            global_batch_tokens=None,
        ),
        dealing=dealing,
        me=me,
        setup=setup,
        model=model,
        objective=_objective(config, model),
        optimizer=optimizer,
        scheduler=scheduler,
        batches=Batches(
            sequences=sequences,
            batch_size=dealing.batch_size,
            micro_steps=dealing.micro_steps,
            rank=me.rank,
            num_ranks=me.num_ranks,
            device=me.device,
        ),
        meter=meter,
        nonfinite=nonfinite,
        checkpoints=checkpoints,
    )
    return run, resumed


def _meter(built: BuiltModel, setup: Setup, me: Rank) -> Meter:
    model, num_devices = built.model, setup.num_gpus or 1
    # Against the bf16 peak an fp32 run would only look bad.
    peak = peak_tflops(setup.device) if setup.precision == "bf16" else None
    if peak is None:
        of_rank = calibrated_tflops(
            os.environ.get("MICS_CLUSTER"), device=setup.device, precision=setup.precision
        )
        peak = None if of_rank is None else of_rank * setup.num_ranks / num_devices
    return Meter(
        sent=lambda: sent_bytes(mics.traffic(model), engine_of(model).topology, me.rank),
        speedometer=Speedometer(
            flops_per_token=built.flops_per_token,
            num_devices=num_devices,
            peak_tflops=peak,
        ),
        device=me.device,
    )


def _begin_weights(config: TrainConfig, model: nn.Module, console: Console) -> None:
    """Of a run that begins: those of the model's folder, each rank what it has of them."""
    folder = config.model.weights
    if folder is not None:
        try:
            mics.load(folder, model)
        except mics.CheckpointError as error:  # on all ranks; another start would end the same way
            raise SettingsError(f"--model {error}") from None
    console.print(config.model.beginning, markup=False)


def _objective(config: TrainConfig, model: nn.Module) -> LanguageModelling:
    objective = config.model.build().objective
    assert objective is not None, "settings refuse such a model"
    return LanguageModelling(model, objective)


def _train(run: _Run, resumed: Resumed, console: Console, stop: Stopping | None) -> tuple[History, int]:
    """Train to the end, or to the step after which all ranks were asked to stop. Returns that step too."""
    config, history, last = run.config, History(), resumed.step
    after = resumed.step if resumed.own else 0
    board = Board(
        num_steps=config.steps,
        on_gpu=run.setup.on_gpu,
        checkpoint_dir=config.checkpoint_dir if config.checkpoint.interval else None,
    )
    news = PrefetchNews(run.model)
    exposure = ExposureMeter(run.model, config)
    with (
        history.recording(config, run.me, after_step=after),
        Display(console, board, show=_show(config, run.me)) as display,
        closing(run.batches.prefetch(first=last + 1, last=config.steps)) as feed,
    ):
        for measurement in history.measurements:
            board.note(measurement)
        board.validation = history.validations[-1] if history.validations else None
        if last >= config.steps and not history.measurements and run.me.rank == 0:
            raise SettingsError(f"steps: expected more than the checkpoint's {last}, found {config.steps}")
        for step in range(last + 1, config.steps + 1):
            if stop is not None and not stop.may_begin(step):
                break
            exposure.begin_step(step)
            grad_norm, learning_rate = _step(run, step, feed, console)
            if (line := news.take()) is not None:
                console.print(line, markup=False)
            interval = config.report.eval_interval
            due = step == config.steps or (interval and step % interval == 0)
            if due and run.batches.sequences.has_validation:
                with run.meter.paused():
                    history.add_validation(step, _validate(run))
                board.validation = history.validations[-1]
            if step == 1 or step == config.steps or step % config.report.interval == 0:
                measurement = run.meter.measure(step, grad_norm=grad_norm, learning_rate=learning_rate)
                measurement = replace(measurement, exposed=exposure.share)
                history.add(measurement)
                board.note(measurement)
                display.update()
            last = step
            stall = run.checkpoints.save_if_due(step)
            if stall is not None:
                history.add_checkpoint(step, stall)
                board.saving_step = step
    return history, last


def _show(config: TrainConfig, me: Rank) -> Show:
    """How this rank shows progress. One that a launcher of ours draws is told to show none."""
    if me.rank != 0 or config.report.progress == "none":
        return "none"
    return "live" if config.report.progress == "auto" and is_live(sys.stdout) else "lines"


def _finish(run: _Run, console: Console, history: History) -> None:
    """What is left to do after the last step."""
    if _show(run.config, run.me) == "lines":
        console.print("writing results")
    run.checkpoints.finish_or_warn()
    folder, weights = _save_weights(run)  # first: a sample that fails must not cost the weights
    sample = _sample(run)
    if run.me.rank == 0:
        paths = write_results(
            run.config, run.setup, history, sample=sample, weights=weights, weights_folder=folder
        )
        show_results(console, history, sample=sample, paths=paths)


def _save_weights(run: _Run) -> tuple[Path | None, dict[str, Tensor]]:
    """Export a model of transformers to its folder. Of others, the whole tensors on rank 0."""
    if not run.config.report.save_weights:
        return None, {}
    if not is_of_transformers(run.model):
        return None, mics.full_state_dict(run.model)
    folder = run.config.run_dir / "hf"
    data = run.config.data
    special = read_index(data.shards[0]).special if data.shards else None
    is_masked = run.objective.objective == "masked"
    framed = special if is_masked and data.tokenizer_folder is not None else None
    ended = None if is_masked else special
    sources = [run.config.model.build().folder, data.tokenizer_folder]
    export_folder(run.model, folder, sources=sources, framed=framed, ended=ended)
    return folder, {}


def _leave(run: _Run, console: Console, step: int, *, saved_step: int) -> None:
    """Save the step that all ranks have agreed to end after."""
    if step == max(saved_step, 0):
        console.print(f"asked to leave after step {step}, before any more was done", markup=False)
        return
    folder = run.checkpoints.save_now(step)
    console.print(f"asked to leave: saved {folder}; --checkpoint.resume latest goes on from it", markup=False)


def _step(run: _Run, step: int, feed: Prefetcher[list[TensorPair]], console: Console) -> tuple[Tensor, float]:
    """One optimizer step. Returns the gradients' norm, still on the device, and the learning rate used."""
    loaded, waited = feed.get(step)
    batches = run.batches.on_device(loaded)
    step_loss = torch.zeros((), dtype=torch.float32, device=run.me.device)
    run.model.train()
    divisor = run.objective.divisor(batches)
    for batch in mics.microsteps(run.model, batches):
        loss = run.objective.loss(batch, divisor=divisor, num_batches=len(batches))
        run.nonfinite.scale(loss).backward()
        step_loss += loss.detach()
    run.nonfinite.unscale_()
    grad_norm = mics.clip_grad_norm_(run.model, run.config.optimizer.max_grad_norm)
    learning_rate = float(run.scheduler.get_last_lr()[0])
    warning = run.nonfinite.step(grad_norm, step)
    if warning is not None:
        console.print(f"mics: warning: {warning}", markup=False)
    run.optimizer.zero_grad()
    run.scheduler.step()
    run.meter.add(step_loss, data_wait=waited)
    return grad_norm, learning_rate


@torch.no_grad()
def _validate(run: _Run) -> float:
    """The mean loss over the validation batches of all ranks."""
    run.model.eval()
    batches = run.batches.validation(run.config.report.eval_batches)
    return mean_over_ranks(run.objective.mean_loss(batches))


def _sample(run: _Run) -> str:
    """Text written by the model.

    All ranks run the same forwards with the same seed: a sharded model needs all of them for every token, and
    they all arrive at the same text.
    """
    report = run.config.report
    prompt = prompt_tokens(run.config, run.batches.sequences)
    if not prompt:
        return ""
    run.model.eval()
    tokens = sample_tokens(
        run.objective.logits,
        torch.tensor([prompt], dtype=torch.int64, device=run.me.device),
        report.sample_tokens,
        seq_len=run.config.model.build().seq_len,
        temperature=report.temperature,
        generator=torch.Generator(run.me.device).manual_seed(run.config.seed),
    )
    return run.batches.sequences.decode(tokens[0].tolist())


def _build_optimizer(model: nn.Module, config: TrainConfig, *, decayed: Set[str]) -> torch.optim.AdamW:
    """AdamW that decays the matrices; decaying a norm's scale towards zero would only fight the norm."""
    settings, named = config.optimizer, dict(model.named_parameters())
    groups = [
        {"params": [named[name] for name in named if name in decayed], "weight_decay": settings.weight_decay},
        {"params": [named[name] for name in named if name not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(settings.beta1, settings.beta2), fused=True
    )


def _learning_rate(config: TrainConfig) -> Callable[[int], float]:
    def share(step: int) -> float:
        return learning_rate_share(
            step,
            num_steps=config.steps,
            warmup_steps=config.optimizer.warmup_steps,
            final_share=config.optimizer.final_share,
        )

    return share
