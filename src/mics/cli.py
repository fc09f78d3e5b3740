"""The ``mics`` command. Each subcommand parses its own arguments and returns an exit code."""

import argparse
import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import mics
from mics.errors import CheckpointError, SettingsError
from mics.utils.deprecation import new_flags
from mics.utils.extras import require


@dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand: what the list of commands says about it, and what it does with its arguments."""

    summary: str
    run: Callable[[Sequence[str]], int]


def _train(args: Sequence[str]) -> int:
    # Each imports only what it needs: a second saved in every rank is most of a short run's start.
    from mics.train.failures import refuse, was_refused

    if was_refused(os.environ):
        return 2  # torchrun starts again what ended with an error in the settings; it has been said
    try:
        return _train_as_told(args)
    except SystemExit as usage:  # of flags that are not understood; --help ends with 0
        if usage.code:
            refuse(os.environ)
        raise
    except SettingsError:
        if not refuse(os.environ):
            return 2
        raise


def _train_as_told(args: Sequence[str]) -> int:
    from mics.train.settings_file import parse_train_config

    config = parse_train_config(args)
    if config.launch.dry_run:
        from rich.console import Console

        from mics.train.dry_run import dry_run

        return dry_run(config, Console(quiet=os.environ.get("RANK", "0") != "0", emoji=False))
    require("plot", "the picture of a run")  # now, not when all is trained
    if config.report.logger != "none":
        require(config.report.logger, f"--logger {config.report.logger}")
    if "RANK" not in os.environ:  # no launcher made this process a rank
        if config.launch.hosts is not None and config.launch.hosts > 1:
            from mics.train.hosts import launch_hosts

            return launch_hosts(config, args)
        from mics.train.launch import launch

        return launch(config, args)
    from torch.distributed.elastic.multiprocessing.errors import record

    from mics.train.loop import run_rank

    code = record(run_rank)(config)  # leaves the traceback where the launcher finds it
    assert isinstance(code, int)
    return code


def _bench(args: Sequence[str]) -> int:
    from mics.bench.command import bench

    return bench(args)


def _calibrate(args: Sequence[str]) -> int:
    from mics.calibrate.command import calibrate

    return calibrate(args)


def _emulate(args: Sequence[str]) -> int:
    from mics.bench.command import emulate

    return emulate(args)


def _plan(args: Sequence[str]) -> int:
    from mics.planner.command import plan

    return plan(args)


def _data(args: Sequence[str]) -> int:
    from mics.data.command import data

    return data(args)


def _checkpoint(args: Sequence[str]) -> int:
    from mics.checkpoint.command import checkpoint

    return checkpoint(args)


def _doctor(args: Sequence[str]) -> int:
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return 1  # torchrun starts again what ended with no-go; that it is so has been said
    from mics.doctor.command import doctor

    return doctor(args)


COMMANDS: Final = {
    "bench": Command(
        summary="compare systems on an emulated cluster, on namespace hosts or on ranks", run=_bench
    ),
    "calibrate": Command(
        summary="measure the cluster this runs on; writes the file that plan and train read", run=_calibrate
    ),
    "checkpoint": Command(
        summary="look into a checkpoint, verify it, convert it from and to Hugging Face", run=_checkpoint
    ),
    "data": Command(
        summary="make text into tokenized, shuffled shards to train on, and check them", run=_data
    ),
    "doctor": Command(
        summary="what would make a run fail or crawl on these hosts; run it as you will train", run=_doctor
    ),
    "emulate": Command(
        summary="train as rank 0 of a cluster that is not there; where time goes", run=_emulate
    ),
    "plan": Command(
        summary="what a training run will cost, how to split it and whether it fits, before renting",
        run=_plan,
    ),
    "train": Command(summary="train a language model; starts its own ranks if no launcher did", run=_train),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``mics``. If nobody reads what it prints, it ends quietly, as others do (``| head``)."""
    try:
        try:
            return _run(argv)
        except KeyboardInterrupt:  # of what does not take it for its own
            print("mics: interrupted", file=sys.stderr)
            return 128 + signal.SIGINT
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where the error can be caught
    except BrokenPipeError:
        if not _is_unread():
            raise
        # Nor may the interpreter's own flush at the end complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _is_unread() -> bool:
    """Whether stdout is a pipe that nobody reads: other things break too."""
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in watched.poll(0))


def _is_ours_to_show(record: logging.LogRecord) -> bool:
    """Not what torch tells the authors of torchao, which transformers imports."""
    return "Calling register_constant() on Enum subclasses" not in record.getMessage()


def _run(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(sys.argv[1:] if argv is None else list(argv))
    logging.getLogger("torch.utils._pytree").addFilter(_is_ours_to_show)
    try:
        require("cli", f"mics {arguments.command}")
        return COMMANDS[arguments.command].run(new_flags(arguments.command, arguments.args))
    except (SettingsError, CheckpointError) as error:
        print(f"mics {arguments.command}: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="mics",
        description="Train PyTorch models too large for one GPU on clusters with an ordinary network.",
        epilog=f"commands:\n{commands}\n\n'mics COMMAND --help' lists the settings of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mics {mics.__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help="what to do")
    parser.add_argument("args", metavar="...", nargs=argparse.REMAINDER, help="its settings")
    return parser


if __name__ == "__main__":
    sys.exit(main())
