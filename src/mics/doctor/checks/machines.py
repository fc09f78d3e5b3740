"""Hosts and processes: what is installed, what the system allows, how ranks are dealt."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Final

from mics.doctor.facts import RankFacts
from mics.doctor.findings import Finding, fail, ok, warn
from mics.doctor.survey import Survey
from mics.utils.numbers import listed, memory, plural, seconds

_MUST_AGREE: Final = ("mics", "mics sources", "torch", "CUDA", "NCCL")
"""Where these differ, ranks do not understand each other, or compute different numbers."""
_CLOCK_WARN_SECONDS: Final = 1.0
_CLOCK_FAIL_SECONDS: Final = 300.0
"""Object stores and Kerberos refuse requests whose time is that far off."""
_START_SECONDS: Final = 60.0
_SHM_NBYTES: Final = 1 << 30
_OPEN_FILES: Final = 4096
_HOST_NBYTES_PER_RANK: Final = 4 << 30


def settings(survey: Survey) -> list[Finding]:
    """All ranks read the same settings, and these fit the number of ranks."""
    found = []
    for error in dict.fromkeys(facts.settings_error for facts in survey.ranks.values()):
        if error:
            ranks = [rank for rank, facts in survey.ranks.items() if facts.settings_error == error]
            found.append(
                fail("settings", error, where=survey.where(ranks), way_out="put the file on every host")
            )
    _, others = survey.outliers(lambda facts: facts.settings_digest or None)
    for ranks in others.values():
        found.append(
            fail(
                "settings",
                "expected the settings of the other ranks, found different ones",
                where=survey.where(ranks),
                way_out="copy the settings file to every host, or keep it in a shared folder",
            )
        )
    size = survey.wishes.partition_size
    if size is not None and survey.num_ranks % size:
        found.append(
            fail(
                "settings",
                f"sharding.partition_size: expected a divisor of the {survey.num_ranks} ranks, found {size}",
                way_out="change it, or start another number of ranks",
            )
        )
    return found + _other_launch(survey)


def _other_launch(survey: Survey) -> list[Finding]:
    """Whether these are the nodes and ranks that the settings speak of."""
    wanted = {"hosts": survey.wishes.num_nodes, "ranks_per_node": survey.wishes.ranks_per_node}
    numbers = {len(ranks) for ranks in survey.nodes.values()}
    if survey.stuck or len(numbers) != 1:  # which other checks say
        return []
    there = {"hosts": len(survey.nodes), "ranks_per_node": numbers.pop()}
    return [
        warn(
            "settings",
            f"launch.{name}: expected {number}, found {there[name]}",
            way_out="start the doctor on the hosts that will train, as the training is started, or change it",
        )
        for name, number in wanted.items()
        if number is not None and number != there[name]
    ]


def versions(survey: Survey) -> list[Finding]:
    """The same software everywhere."""
    found: list[Finding] = []
    names = list(dict.fromkeys(name for facts in survey.ranks.values() for name in facts.versions))
    shown = []
    for name in names:
        usual, others = survey.outliers(partial(_version, name))
        if not others and usual not in ("not installed", "none"):
            shown.append(f"{name} {usual}")
        make = fail if name in _MUST_AGREE else warn
        for version, ranks in others.items():
            if name == "mics sources" and any(line.what.startswith("mics: ") for line in found):
                continue  # another version has other sources
            found.append(
                make(
                    "versions",
                    f"{name}: expected {usual} as on the others, found {version}",
                    where=survey.where(ranks),
                    way_out="install the same environment, or the same container image, on every host",
                )
            )
    return found or [ok("versions", "the same everywhere: " + ", ".join(shown))]


def _version(name: str, facts: RankFacts) -> str:
    return facts.versions.get(name, "none")


def clocks(survey: Survey) -> list[Finding]:
    """Each node's clock agrees with rank 0's."""
    found: list[Finding] = []
    if len(survey.clocks) < 2:
        return found
    ahead = {node: clock.seconds for node, clock in survey.clocks.items()}
    # Rank 0's own clock may be the wrong one: of three or more, most are right.
    middle = statistics.median_low(list(ahead.values())) if len(ahead) > 2 else 0.0
    for node, offset in ahead.items():
        off = offset - middle
        if abs(off) <= _CLOCK_WARN_SECONDS:
            continue
        make = fail if abs(off) > _CLOCK_FAIL_SECONDS else warn
        found.append(
            make(
                "clocks",
                f"the clock is {seconds(abs(off))} {'ahead of' if off > 0 else 'behind'} the others'",
                where=survey.on_nodes([node]),
                way_out="start chrony or systemd-timesyncd there",
            )
        )
    widest = max(clock.high - clock.low for clock in survey.clocks.values())
    return found or [ok("clocks", f"agree to {seconds(max(map(abs, ahead.values())) + widest)}")]


def start(survey: Survey) -> list[Finding]:
    """How long a process needs from its start until it has joined."""
    times = {rank: facts.machine.seconds_to_start for rank, facts in survey.ranks.items()}
    if not times:
        return []
    usual = statistics.median(times.values())
    late = [rank for rank, found in times.items() if found > max(_START_SECONDS, 3 * usual)]
    if late:
        worst = max(times[rank] for rank in late)
        return [
            warn(
                "start",
                f"took {seconds(worst)} from the start of the process until it joined, the median is "
                f"{seconds(usual)}",
                where=survey.where(late),
                way_out="keep the Python environment on a local disk, not on a network file system",
            )
        ]
    return [
        ok(
            "start",
            f"ranks joined {seconds(usual)} after their start, the last after {seconds(max(times.values()))}",
        )
    ]


def ranks_per_node(survey: Survey) -> list[Finding]:
    """As many on each node."""
    counts = {node: len(ranks) for node, ranks in survey.nodes.items()}
    if survey.stuck or len(counts) < 2:
        return []
    usual = statistics.mode(counts.values())
    other = [node for node, number in counts.items() if number != usual]
    if not other:
        return [ok("ranks per node", f"{usual} on each")]
    return [
        warn(
            "ranks per node",
            f"expected {usual} as on the others, found {counts[node]}",
            where=survey.on_nodes([node]),
            way_out="give torchrun the same --nproc-per-node there, and check that all GPUs are visible",
        )
        for node in other
    ]


def restarts(survey: Survey) -> list[Finding]:
    """Whether the launcher starts failed ranks again: on several nodes nobody else does."""
    if len(survey.nodes) < 2 or survey.wishes.checkpoint_dir is None:
        return []
    usual, others = survey.outliers(lambda facts: facts.max_restarts)
    if others:
        return [
            warn(
                "restarts",
                f"--max-restarts: expected {usual} as on the others, found "
                f"{listed([str(number) for number in others])}",
                where=survey.where(rank for ranks in others.values() for rank in ranks),
                way_out="give torchrun the same number on every host",
            )
        ]
    if usual == 0:
        return [
            warn(
                "restarts",
                "torchrun does not start failed ranks again (--max-restarts=0): one failure ends the run",
                way_out="start it with --max-restarts=3, so that it goes on from the latest checkpoint",
            )
        ]
    return [] if usual is None else [ok("restarts", f"torchrun starts failed ranks again, {usual} times")]


def cores(survey: Survey) -> list[Finding]:
    """Threads of all ranks of a node against its cores."""
    found = []
    for node, ranks in survey.nodes.items():
        facts = survey.ranks[ranks[0]]
        wanted = sum(survey.ranks[rank].machine.threads for rank in ranks)
        if wanted > facts.machine.cpus:
            found.append((node, wanted, facts.machine.cpus))
    if not found:
        fewest = min((f.machine.cpus for f in survey.leaders.values()), default=0)
        return [
            ok("cores", f"{plural(fewest, 'core')} or more on each node, enough for the threads of its ranks")
        ]
    _, wanted, cpus = found[0]
    share = max(1, cpus // max(len(survey.nodes[found[0][0]]), 1))
    return [
        warn(
            "cores",
            f"expected at most {plural(cpus, 'thread')} for {plural(cpus, 'core')}, found {wanted}",
            where=survey.on_nodes(node for node, _, _ in found),
            way_out=f"set OMP_NUM_THREADS={share}, or start fewer ranks",
        )
    ]


def host_memory(survey: Survey) -> list[Finding]:
    """Free memory of hosts."""
    return _too_little(
        survey,
        "host memory",
        {
            node: (facts.machine.memory_free_nbytes, _HOST_NBYTES_PER_RANK * len(survey.nodes[node]))
            for node, facts in survey.leaders.items()
            if facts.machine.memory_nbytes
        },
        "free host memory",
        "end what else runs there (ps aux --sort=-rss), or start fewer ranks",
    )


def shared_memory(survey: Survey) -> list[Finding]:
    """/dev/shm, which NCCL and data loaders share buffers in."""
    return _too_little(
        survey,
        "shared memory",
        {
            node: (facts.machine.shm_free_nbytes if facts.machine.shm_nbytes is not None else 0, _SHM_NBYTES)
            for node, facts in survey.leaders.items()
        },
        "free in /dev/shm",
        "mount it larger (docker run --shm-size=16g or --ipc=host), and remove what others left in it",
    )


def _too_little(
    survey: Survey, check: str, amounts: dict[str, tuple[int, int]], what: str, way_out: str
) -> list[Finding]:
    short = {node: amount for node, amount in amounts.items() if amount[0] < amount[1]}
    if not amounts:
        return []
    if not short:
        return [ok(check, f"{memory(min(free for free, _ in amounts.values()))} or more {what} on each node")]
    return [
        warn(
            check,
            f"expected at least {memory(wanted)} {what}, found {memory(free)}",
            where=survey.on_nodes([node]),
            way_out=way_out,
        )
        for node, (free, wanted) in short.items()
    ]


def limits(survey: Survey) -> list[Finding]:
    """``ulimit -l`` where adapters register memory, and ``ulimit -n``."""
    found = []

    def pinned_too_little(facts: RankFacts) -> bool:
        return bool(facts.network.adapters) and facts.machine.memlock_nbytes is not None

    locked = [rank for rank, facts in survey.ranks.items() if pinned_too_little(facts)]
    if locked:
        least = min(survey.ranks[rank].machine.memlock_nbytes or 0 for rank in locked)
        found.append(
            fail(
                "limits",
                f"ulimit -l: expected unlimited, since the adapter registers memory, found {memory(least)}",
                where=survey.where(locked),
                way_out="set memlock to unlimited (/etc/security/limits.conf; docker run --ulimit "
                "memlock=-1; LimitMEMLOCK=infinity for slurmd)",
            )
        )
    few = [
        r
        for r, f in survey.ranks.items()
        if f.machine.open_files is not None and f.machine.open_files < _OPEN_FILES
    ]
    if few:
        least = min(survey.ranks[rank].machine.open_files or 0 for rank in few)
        found.append(
            warn(
                "limits",
                f"ulimit -n: expected at least {_OPEN_FILES}, found {least}",
                where=survey.where(few),
                way_out="raise nofile in /etc/security/limits.conf (docker run --ulimit nofile=65536)",
            )
        )
    return found or [ok("limits", "ulimit -l and ulimit -n suffice")]
