"""Finding the rank that failed first among the logs of a run, and showing it."""

import json
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_AGENT_SAYS: Final = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local_rank>\d+)")
_NUM_TAIL_LINES: Final = 40


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
    def is_consequence(self) -> bool:
        """The error says that another rank was lost, so that one is to blame."""
        return re.search(r"CollectiveError|DistBackendError|[Cc]onnection", self.last_line) is not None

    @property
    def blame(self) -> tuple[bool, bool, int]:
        """Sorts the culprit first: a rank ended by a signal cannot report, the others report about it."""
        return (self.exit_code >= 0, self.is_consequence, self.time_ns)


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
    # An error in the settings is the user's to mend, and where in our code it was noticed does not help.
    shown = first.last_line if "SettingsError" in first.last_line else first.traceback.rstrip()
    print(f"\n{shown}", file=sys.stderr)
    print(
        f"mics: rank {first.rank} (node {first.node}) failed with {how}; logs are in {log_dir}",
        file=sys.stderr,
    )
    return first.exit_code if first.exit_code > 0 else 128 - first.exit_code


def find_failures(log_dir: Path, *, ranks_per_node: int) -> list[Failure]:
    """What each node's agent says failed on it, with the traceback the rank left."""
    failures = []
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
    return failures


def _read_traceback(node_dir: Path, local_rank: int) -> tuple[str, int]:
    """The traceback a rank recorded and when, or the end of what it printed if it could not record one."""
    for file in node_dir.glob(f"*/attempt_*/{local_rank}/error.json"):
        message = json.loads(file.read_text())["message"]
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
