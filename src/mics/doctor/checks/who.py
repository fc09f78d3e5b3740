"""Who came, and who stopped answering where."""

from __future__ import annotations

from collections import defaultdict

from mics.doctor.facts import spans
from mics.doctor.findings import Finding, fail, ok
from mics.doctor.survey import Survey
from mics.utils.numbers import plural

_STAGES = {
    "facts": "did not say what is installed; a driver or a file system hangs there: try nvidia-smi and df",
    "compute": "did not finish a matrix product; the GPU hangs: look at dmesg for Xid errors, reset the GPU",
    "folder": "did not finish with the checkpoint folder; its file system hangs: try ls on it",
    "network": "did not finish the collectives; it is stuck in one: see the lines about its interface",
}


def answers(survey: Survey) -> list[Finding]:
    """All ranks joined, and none got stuck."""
    missing = [stuck.rank for stuck in survey.stuck if stuck.stage == "hello"]
    found = [_missing(survey, node, ranks) for node, ranks in _by_node(survey, missing).items()]
    for stage, text in _STAGES.items():
        for stuck in survey.stuck:
            if stuck.stage == stage:
                what, _, way_out = text.partition("; ")
                said = f" ({stuck.error})" if stuck.error else ""
                found.append(fail("ranks", what + said, where=_place(survey, stuck.rank), way_out=way_out))
    if found:
        return found
    return [ok("ranks", f"{plural(survey.num_ranks, 'rank')} on {plural(len(survey.nodes), 'node')} joined")]


def _place(survey: Survey, rank: int) -> str:
    if rank in survey.ranks:
        return survey.where([rank])
    hello = survey.hellos.get(rank)
    return f"{hello.host} (rank {rank})" if hello else f"rank {rank}"


def _by_node(survey: Survey, missing: list[int]) -> dict[str, list[int]]:
    """Missing ranks by what is known of their node: ranks are dealt to nodes in order."""
    found: dict[str, list[int]] = defaultdict(list)
    per_node = next((place.ranks_per_node for place in survey.hellos.values()), 1)
    for rank in missing:
        mates = [p for r, p in survey.hellos.items() if r // per_node == rank // per_node]
        found[mates[0].host if mates else f"node {rank // per_node} (no rank of it came)"].append(rank)
    return found


def _missing(survey: Survey, node: str, ranks: list[int]) -> Finding:
    word = "rank" if len(ranks) == 1 else "ranks"
    return fail(
        "ranks",
        f"expected {plural(survey.num_ranks, 'rank')}, found {len(survey.hellos)}: {word} {spans(ranks)} did "
        "not come",
        where=node,
        way_out="see what they printed there, whether that host runs, and whether it reaches MASTER_ADDR; "
        "--timeout waits longer",
    )
