"""Finding the rank that failed first among the logs of a run, and showing it."""

import json
import re
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mics.train.stopping import LEFT_CODE

UNREAD_CODE: Final = 128 + signal.SIGPIPE
"""Exit code of a command whose output nobody reads any more."""
ERROR_FILES: Final = "node*/*/attempt_*/*/error.json"
"""Where a rank records the error that ended it, under the folder of logs."""

_AGENT_SAYS: Final = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local_rank>\d+)")
_NUM_TAIL_LINES: Final = 40
_COLLECTIVE: Final = re.compile(r"CollectiveError: (?P<what>\S+ of .+?) failed")
# What liveness says about the ranks that the others wait for.
_MISSING: Final = re.compile(
    r"(?:cut off|one is behind|Left already): (?P<ranks>rank .+?)\. The backend said"
)
_WHO: Final = re.compile(r"rank (\d+) \(")
_TO_MEND: Final = re.compile(r"mics\.errors\.(?:SettingsError|CheckpointError): (?P<what>.+)")
# Another attempt would end the same way.
_FINAL: Final = re.compile(r"SettingsError|NonfiniteError")


def was_refused(environ: Mapping[str, str]) -> bool:
    """Whether torchrun starts again what ranks of this host have refused: it would end the same way."""
    file = _refusal(environ)
    return file is not None and environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and file.exists()


def refuse(environ: Mapping[str, str]) -> bool:
    """Note that the settings are wrong. Returns whether this rank says so: under torchrun, one of a host.

    Not always the same one: torchrun ends the others as soon as it sees one leave.
    """
    file = _refusal(environ)
    if file is None:
        return True
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # a full disk, or a folder that is gone
        pass
    return True


def _refusal(environ: Mapping[str, str]) -> Path | None:
    """Where the ranks of a host note it: in torchrun's folder, which all of its attempts share.

    Errors are in ``<log_dir>/<job>/attempt_<count>/<local rank>/error.json``. Settings that are wrong on so
    many ranks may be right on others, in an elastic job.
    """
    errors = environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(errors).parents[2] / f"mics-refused-on-{environ['WORLD_SIZE']}" if errors else None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One rank that failed."""

    rank: int
    node: int
    exit_code: int
    """As the agent saw it: negative is the number of the signal that ended the rank."""
    traceback: str
    time_ns: int

    @property
    def last_line(self) -> str:
        """The error itself."""
        return self.traceback.rstrip().rsplit("\n", 1)[-1]

    @property
    def error(self) -> str:
        """The error itself without where it was raised, as one line of bearable length."""
        return self.last_line if len(self.last_line) <= 200 else self.last_line[:200] + "..."

    @property
    def is_consequence(self) -> bool:
        """The error says that another rank was lost, so that one is to blame."""
        if self.collective is not None:
            return True
        return re.search(r"CollectiveError|DistBackendError|[Cc]onnection", self.last_line) is not None

    @property
    def collective(self) -> str | None:
        """The collective in which this rank lost another."""
        found = _COLLECTIVE.search(self.traceback)
        return None if found is None else found["what"]

    @property
    def missing(self) -> list[int]:
        """The ranks that this one waited for in vain."""
        found = _MISSING.search(self.traceback)
        return [] if found is None else [int(rank) for rank in _WHO.findall(found["ranks"])]

    @property
    def left(self) -> bool:
        """It was asked to leave, saved and left."""
        return self.exit_code == LEFT_CODE

    @property
    def unread(self) -> bool:
        """Nobody reads what it prints: ``mics train | head``."""
        return self.exit_code == UNREAD_CODE or self.last_line.startswith("BrokenPipeError")

    @property
    def is_final(self) -> bool:
        """Starting again would not help."""
        return _FINAL.search(self.last_line) is not None

    @property
    def blame(self) -> tuple[bool, bool, int]:
        """Sorts the culprit first: a rank ended by a signal cannot report, the others report about it."""
        return (self.exit_code >= 0, self.is_consequence, self.time_ns)


def is_hopeless(failures: Sequence[Failure], *, began: bool) -> bool:
    """Whether another start would end the same way.

    Settings do, and so does an error of a rank's own before training began; one that comes later need not.
    """
    first = min(failures, key=lambda failure: failure.blame, default=None)
    if first is None:
        return False
    own = first.exit_code > 0 and not first.is_consequence
    return any(failure.is_final for failure in failures) or (own and not began)


def is_told(failures: Sequence[Failure], *, num_ranks: int) -> bool:
    """Whether every rank has failed, or is the one that the others waited for."""
    ranks = {failure.rank for failure in failures} | {r for failure in failures for r in failure.missing}
    return len(ranks) == num_ranks


def describe_failures(failures: Sequence[Failure], agent_codes: Sequence[int | None]) -> str:
    """What happened, in one sentence: who failed and how, and where the others were."""
    waiting = [failure for failure in failures if failure.collective is not None]
    return _describe_culprit(failures, agent_codes) + (
        f"; rank {waiting[0].rank} was in {waiting[0].collective}" if waiting else ""
    )


def _describe_culprit(failures: Sequence[Failure], agent_codes: Sequence[int | None]) -> str:
    for node, code in enumerate(agent_codes):
        if code is not None and code < 0:
            return f"node {node} is gone: its agent was ended by {signal.Signals(-code).name}"
    first = min(failures, key=lambda failure: failure.blame, default=None)
    if first is None:
        return "the ranks ended without a word"
    if first.exit_code < 0:
        return f"rank {first.rank} (node {first.node}) was ended by {signal.Signals(-first.exit_code).name}"
    named = Counter(rank for failure in failures for rank in failure.missing)
    if first.is_consequence and named:
        lost = sorted(rank for rank, count in named.items() if count == max(named.values()))
        return f"the others waited in vain for {', '.join(f'rank {rank}' for rank in lost)}"
    return f"rank {first.rank} (node {first.node}) failed: {first.error}"


def report_failure(log_dir: Path, *, ranks_per_node: int) -> int:
    """Print the failure that caused the others and return the exit code it deserves."""
    failures = sorted(
        find_failures(log_dir, ranks_per_node=ranks_per_node), key=lambda failure: failure.blame
    )
    if not failures:
        print(_agent_tails(log_dir), file=sys.stderr)
        print(
            f"mics: the ranks could not be started or ended without a word; logs are in {log_dir}",
            file=sys.stderr,
        )
        return 1
    first = failures[0]
    how = f"exit code {first.exit_code}"
    if first.exit_code < 0:
        how = f"signal {signal.Signals(-first.exit_code).name}"
    # Settings and files are the user's to mend: as if they had been found out before the start.
    to_mend = _TO_MEND.match(first.last_line)
    if to_mend is not None:
        print(f"mics train: error: {to_mend['what']}", file=sys.stderr)
        return first.exit_code
    print(f"\n{first.traceback.rstrip()}", file=sys.stderr)
    print(
        f"mics: rank {first.rank} (node {first.node}) failed with {how}; logs are in {log_dir}",
        file=sys.stderr,
    )
    return first.exit_code if first.exit_code > 0 else 128 - first.exit_code


def find_failures(log_dir: Path, *, ranks_per_node: int) -> list[Failure]:
    """What each node's agent says failed on it, with the traceback the rank left.

    An agent names the first of its ranks alone, and none while it waits for one that does not end: the others
    are known by the errors they recorded.
    """
    failures: list[Failure] = []
    for agent_log in sorted(log_dir.glob("node*.log")):
        node = int(agent_log.stem.removeprefix("node"))
        for match in _AGENT_SAYS.finditer(agent_log.read_text(errors="replace")):
            local_rank, exit_code = int(match["local_rank"]), int(match["code"])
            if exit_code == -signal.SIGTERM:
                continue  # stopped by its agent or by us, after something else had failed
            traceback, written_ns = _read_traceback(log_dir / f"node{node}", local_rank)
            failures.append(
                Failure(
                    rank=node * ranks_per_node + local_rank,
                    node=node,
                    exit_code=exit_code,
                    traceback=traceback,
                    time_ns=written_ns or agent_log.stat().st_mtime_ns,
                )
            )
    known = {failure.rank for failure in failures}
    for error_file in sorted(log_dir.glob(ERROR_FILES)):
        node, local_rank = int(error_file.parents[3].name.removeprefix("node")), int(error_file.parent.name)
        rank = node * ranks_per_node + local_rank
        if rank not in known:
            traceback, written_ns = _read_traceback(log_dir / f"node{node}", local_rank)
            failures.append(
                Failure(rank=rank, node=node, exit_code=1, traceback=traceback, time_ns=written_ns)
            )
    return failures


def _read_traceback(node_dir: Path, local_rank: int) -> tuple[str, int]:
    """The traceback a rank recorded and when, or the end of what it printed if it could not record one."""
    for file in node_dir.glob(f"*/attempt_*/{local_rank}/error.json"):
        try:
            message = json.loads(file.read_text())["message"]
        except json.JSONDecodeError:  # being written, or cut off by a signal
            continue
        trace = message if isinstance(message, str) else message["extraInfo"]["py_callstack"]
        return str(trace), file.stat().st_mtime_ns
    for file in node_dir.glob(f"*/attempt_*/{local_rank}/stderr.log"):
        lines = file.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_NUM_TAIL_LINES:]), 0
    return "", 0


def _agent_tails(log_dir: Path) -> str:
    tails = []
    for agent_log in sorted(log_dir.glob("node*.log")):
        tails += agent_log.read_text(errors="replace").splitlines()[-_NUM_TAIL_LINES:]
    return "\n".join(tails)
