"""The command line of the namespace cluster: run a program on it, remove leftovers, check the machine."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from benchmarks.cluster.counters import Traffic
from benchmarks.cluster.launch import launch
from benchmarks.cluster.network import ClusterError, NameLock, NamespaceCluster, remove_namespaces
from benchmarks.cluster.requirements import examine, reason_against

DESCRIPTION = """\
Several hosts on this machine, joined by a network with a limited rate (Linux, root).

Each host is a network namespace with an uplink to a common switch; ranks of one host talk over its loopback,
unthrottled. The cluster comes up, runs the program under `torchrun` on every host, and goes away again, also
after an error or Ctrl-C. The machine's own interfaces are never touched."""

EXAMPLES = """\
examples, from the root of the repository:
  python -m benchmarks.cluster check
  python -m benchmarks.cluster run --hosts 4 --ranks 2 --rate 500mbit -- train.py --steps 10
  python -m benchmarks.cluster run --hosts 4 --ranks 2 --rate 500mbit \\
      -- -m benchmarks.cluster.collectives --out collectives.json
  python -m benchmarks.cluster down        only needed when a run was killed and none is to follow"""


def say(text: str) -> None:
    """To standard error: standard output belongs to the program."""
    print(text, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="bring a cluster up, run a program on it, take it down",
        usage="%(prog)s [options] -- (SCRIPT | -m MODULE) [ARG ...]",
        description="Host 0's output passes through; of the other hosts, the last lines when they fail. "
        "Ends with the worst of the hosts' exit codes, 124 after a timeout. Ranks read the uplink's "
        "counters with benchmarks.cluster.counters.uplink_nbytes().",
    )
    run.add_argument("--hosts", type=int, default=2, metavar="N", help="number of hosts (default 2)")
    run.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks on each host (default 1)")
    run.add_argument(
        "--rate",
        default="500mbit",
        help="of each uplink, each direction: a number and kbit, mbit or gbit (default 500mbit)",
    )
    run.add_argument("--delay", help="one way between two hosts, such as 1ms (default none; needs netem)")
    run.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds until all is stopped (default 600)"
    )
    run.add_argument("--json", type=Path, metavar="FILE", help="write exit code, time and uplink bytes there")
    down = commands.add_parser("down", help="remove what a killed run left behind")
    for command in (run, down):
        command.add_argument(
            "--name", default="mics", help="of the cluster; several live side by side (default mics)"
        )
    commands.add_parser("check", help="say whether this machine can do it, and if not, why")
    return top


def end_on_signal(signum: int, frame: FrameType | None) -> NoReturn:
    """Leave through the exit of every open context, with the exit code a shell gives."""
    raise SystemExit(128 + signum)


def run(args: argparse.Namespace, program: Sequence[str]) -> int:
    if args.ranks < 1:
        raise ClusterError(f"expected at least 1 rank on each host, found {args.ranks}")
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, end_on_signal)
    reason = reason_against(examine(), delay=args.delay is not None)
    if reason is not None:
        raise ClusterError(f"this machine cannot do it: {reason}")
    with NamespaceCluster(args.hosts, args.rate, args.delay, args.name) as cluster:
        start = time.monotonic()
        ending = launch(cluster, args.ranks, program, timeout_s=args.timeout, say=say)
        seconds = time.monotonic() - start
        uplinks = cluster.counters()
    show(uplinks)
    if args.json is not None:
        report = {
            "hosts": args.hosts,
            "ranks_per_host": args.ranks,
            "rate": args.rate,
            "delay": args.delay,
            "program": list(program),
            "exit_code": ending.exit_code,
            "seconds": round(seconds, 3),
            "uplinks": [{"host": host, **traffic._asdict()} for host, traffic in enumerate(uplinks)],
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return ending.exit_code


def show(uplinks: Sequence[Traffic]) -> None:
    say("uplink          sent bytes    received bytes")
    for host, traffic in enumerate(uplinks):
        say(f"host {host:<4} {traffic.sent_nbytes:>17,} {traffic.received_nbytes:>17,}")


def down(name: str) -> int:
    lock = NameLock(name)
    lock.acquire()
    try:
        removed = remove_namespaces(name)
    finally:
        lock.release()
    say(f"removed {', '.join(removed)}" if removed else f"nothing left of a cluster named {name}")
    return 0


def check() -> int:
    requirements = examine()
    for requirement in requirements:
        state = "yes" if requirement.missing is None else f"no: {requirement.missing}"
        print(f"{requirement.name:<20} {state}")
    if reason_against(requirements) is not None:
        print("this machine cannot play a cluster")
        return 1
    without = reason_against(requirements, delay=True) is not None
    print("this machine can play a cluster" + (", without --delay" if without else ""))
    return 0


def main(argv: Sequence[str]) -> int:
    split = argv.index("--") if "--" in argv else len(argv)
    args, program = parser().parse_args(argv[:split]), argv[split + 1 :]
    try:
        if args.command == "down":
            return down(args.name)
        if args.command == "check":
            return check()
        if not program:
            raise ClusterError("expected a program after `--`, found none: run [options] -- script.py")
        return run(args, program)
    except ClusterError as error:
        say(f"benchmarks.cluster: error: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
