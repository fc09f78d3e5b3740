"""The doctor's checks on made-up facts of many ranks: each names what is wrong, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mics.doctor.checks import CHECKS, judge
from mics.doctor.checks.devices import compute_results, compute_speed, gpu_memory, gpus, nccl_and_driver
from mics.doctor.checks.machines import (
    clocks,
    cores,
    host_memory,
    limits,
    ranks_per_node,
    restarts,
    settings,
    shared_memory,
    start,
    versions,
)
from mics.doctor.checks.networks import adapters, bandwidth, collectives, doors, interfaces, pairs
from mics.doctor.checks.storage import data, folder, folder_space, folder_speed
from mics.doctor.checks.who import answers
from mics.doctor.facts import (
    Adapter,
    ClockFacts,
    ComputeFacts,
    FolderFacts,
    GpuFacts,
    Interface,
    InterfaceChoice,
    MachineFacts,
    NetworkFacts,
    NetworkResults,
    Place,
    RankFacts,
    Stuck,
    Transfer,
    decode,
    encode,
)
from mics.doctor.findings import Finding, is_go
from mics.doctor.survey import Survey, Wishes

_GIB = 1 << 30
_ETH = Interface(name="eth0", physical=True, speed_mbit=100_000, addresses=["10.0.0.1"])
_SLOW = Interface(name="eth1", physical=True, speed_mbit=1_000, addresses=["10.1.0.1"])
_LO = Interface(name="lo", loopback=True, addresses=["127.0.0.1"])
_EFA = Adapter(name="efa_0", kind="efa")


def _rank(rank: int, ranks_per_node: int) -> RankFacts:
    node = rank // ranks_per_node
    return RankFacts(
        place=Place(
            rank=rank,
            local_rank=rank % ranks_per_node,
            ranks_per_node=ranks_per_node,
            node=str(node),
            host=f"h{node}",
            stack=f"h{node}",
        ),
        versions={
            "python": "3.12.1",
            "mics": "0.2",
            "mics sources": "ab",
            "torch": "2.13.0",
            "NCCL": "2.27.5",
        },
        machine=MachineFacts(
            cpus=96,
            threads=4,
            memory_nbytes=1000 * _GIB,
            memory_free_nbytes=900 * _GIB,
            shm_nbytes=500 * _GIB,
            shm_free_nbytes=500 * _GIB,
            open_files=65536,
            seconds_to_start=8.0,
        ),
        network=NetworkFacts(
            interfaces=[_LO, _ETH, _SLOW],
            gloo=InterfaceChoice(name="eth0", because="GLOO_SOCKET_IFNAME=eth0"),
            nccl=InterfaceChoice(name="eth0", because="NCCL takes the first that fits"),
        ),
        gpu=GpuFacts(
            name="A100",
            total_nbytes=80 * _GIB,
            free_nbytes=79 * _GIB,
            num_gpus=ranks_per_node,
            driver_cuda=12080,
            runtime_cuda=12080,
        ),
        max_restarts=3,
        settings_digest="same",
    )


def _healthy(num_nodes: int = 4, ranks_per_node: int = 2, rate: float = 1e9) -> Survey:
    """A cluster without a fault: every pair of nodes sends at ``rate``."""
    ranks = {rank: _rank(rank, ranks_per_node) for rank in range(num_nodes * ranks_per_node)}
    sent = {
        rank: [
            Transfer(source=rank, target=other, nbytes=int(rate), seconds=float(ranks_per_node))
            for other in ranks
            if other % ranks_per_node == rank % ranks_per_node and other != rank
        ]
        for rank in ranks
    }
    nodes = [str(node) for node in range(num_nodes)]
    return Survey(
        num_ranks=len(ranks),
        ranks=ranks,
        wishes=Wishes(
            checkpoint_dir=Path("/fsx/run"),
            checkpoint_nbytes=10**9,
            kept=2,
            partition_size=2,
            shards=(Path("/fsx/data"),),
            num_nodes=num_nodes,
            ranks_per_node=ranks_per_node,
        ),
        clocks={node: ClockFacts(low=-0.01, high=0.01) for node in nodes},
        folders={node: FolderFacts(write_rate=1e9, read_rate=1e9, free_nbytes=10**12) for node in nodes},
        computed={rank: ComputeFacts(kind="A100", rate=2e14, digest="d") for rank in ranks},
        networks={rank: NetworkResults(sent=sent[rank]) for rank in ranks},
        hellos={rank: facts.place for rank, facts in ranks.items()},
    )


def _with(survey: Survey, rank: int, **changes: Any) -> Survey:
    """One rank's facts changed."""
    return replace(survey, ranks={**survey.ranks, rank: replace(survey.ranks[rank], **changes)})


def _on_node(survey: Survey, node: int, change: Callable[[RankFacts], RankFacts]) -> Survey:
    """The facts of all ranks of one node changed."""
    ranks = {r: change(f) if f.place.node == str(node) else f for r, f in survey.ranks.items()}
    return replace(survey, ranks=ranks)


def _machine(**changes: Any) -> Callable[[RankFacts], RankFacts]:
    return lambda facts: replace(facts, machine=replace(facts.machine, **changes))


def _network(**changes: Any) -> Callable[[RankFacts], RankFacts]:
    return lambda facts: replace(facts, network=replace(facts.network, **changes))


def _gpu(**changes: Any) -> Callable[[RankFacts], RankFacts]:
    return lambda facts: replace(facts, gpu=replace(facts.gpu or GpuFacts(), **changes))


def _scaled(survey: Survey, factor: Callable[[str, str], float]) -> Survey:
    """Transfers between nodes slowed down."""

    def slowed(each: Transfer) -> Transfer:
        ends = (survey.ranks[rank].place.host for rank in (each.source, each.target))
        return replace(each, seconds=each.seconds / factor(*ends))

    networks = {
        rank: replace(found, sent=[slowed(each) for each in found.sent])
        for rank, found in survey.networks.items()
    }
    return replace(survey, networks=networks)


def _only(findings: list[Finding]) -> Finding:
    (found,) = findings
    return found


def test_a_healthy_cluster_is_a_go() -> None:
    """Each check has one line of ok, or none: here no node has an adapter or an old driver."""
    findings = judge(_healthy())
    assert is_go(findings)
    assert {finding.level for finding in findings} == {"ok"}
    assert len({finding.check for finding in findings}) == len(findings) >= len(CHECKS) - 3
    assert not any(finding.way_out for finding in findings)


def test_a_single_process_is_a_go() -> None:
    """On one CPU there is nothing to compare with."""
    alone = _on_node(_healthy(1, 1), 0, lambda facts: replace(facts, gpu=None))
    alone = replace(alone, wishes=Wishes())
    assert {finding.level for finding in judge(alone)} == {"ok"}


def _cases() -> list[Any]:
    """(check, survey with one fault, level, host, part of the text)."""
    good = _healthy()
    two = _healthy(2, 1)
    efa = replace(good.ranks[0].network, adapters=[_EFA], ofi_plugin="libnccl-net.so")
    with_efa = replace(good, ranks={r: replace(f, network=efa) for r, f in good.ranks.items()})
    other_torch = {**good.ranks[5].versions, "torch": "2.12.0"}
    no_such = InterfaceChoice(name=None, because="GLOO_SOCKET_IFNAME=ens5")
    return [
        (settings, _with(good, 3, settings_error="--config x"), "fail", "h1 (rank 3)", "--config x"),
        (settings, _with(good, 3, settings_digest="other"), "fail", "h1 (rank 3)", "different"),
        (settings, replace(good, wishes=Wishes(partition_size=3)), "fail", "", "divisor of the 8 ranks"),
        (
            data,
            _with(two, 1, missing_shards=["a"]),
            "fail",
            "h1 (rank 1)",
            "found none at a",
        ),
        (
            data,
            _with(_with(two, 0, missing_shards=["a", "b"]), 1, missing_shards=["a"]),
            "fail",
            "",
            "found none at a, b",
        ),
        (data, _with(two, 1, data_error="a/t.npy: found 3; copy it"), "fail", "h1 (rank 1)", "a/t.npy"),
        (data, _with(two, 0, data_seen=False), "warn", "h0 (rank 0)", "more to look at"),
        (settings, replace(good, wishes=Wishes(num_nodes=5)), "warn", "", "hosts: expected 5, found 4"),
        (settings, replace(good, wishes=Wishes(ranks_per_node=4)), "warn", "", "expected 4, found 2"),
        (versions, _with(good, 5, versions=other_torch), "fail", "h2 (rank 5)", "found 2.12.0"),
        (
            versions,
            _with(good, 5, versions={**good.ranks[5].versions, "python": "3.12.9"}),
            "warn",
            "h2 (rank 5)",
            "python: expected 3.12.1",
        ),
        (
            clocks,
            replace(good, clocks={**good.clocks, "2": ClockFacts(low=4.0, high=4.2)}),
            "warn",
            "h2 (ranks 4-5)",
            "4.00 s ahead",
        ),
        (
            clocks,
            replace(good, clocks={**good.clocks, "2": ClockFacts(low=-900.0, high=-899.9)}),
            "fail",
            "h2 (ranks 4-5)",
            "900 s behind",
        ),
        (start, _with(good, 7, machine=MachineFacts(seconds_to_start=200.0)), "warn", "h3 (rank 7)", "200 s"),
        (ranks_per_node, _without(good, 7), "warn", "h3 (rank 6)", "expected 2 as on the others, found 1"),
        (restarts, _with(good, 7, max_restarts=0), "warn", "h3 (rank 7)", "expected 3"),
        (cores, _on_node(good, 1, _machine(threads=96)), "warn", "h1 (ranks 2-3)", "found 192"),
        (host_memory, _on_node(good, 1, _machine(memory_free_nbytes=_GIB)), "warn", "h1", "found 1.00 GiB"),
        (shared_memory, _on_node(good, 1, _machine(shm_free_nbytes=64 << 20)), "warn", "h1", "64.0 MiB"),
        (shared_memory, _on_node(good, 1, _machine(shm_nbytes=None)), "warn", "h1", "/dev/shm"),
        (limits, _on_node(with_efa, 1, _machine(memlock_nbytes=65536)), "fail", "h1", "ulimit -l"),
        (limits, _on_node(good, 1, _machine(open_files=1024)), "warn", "h1", "found 1024"),
        (gpus, _on_node(good, 1, _gpu(name="V100")), "fail", "h1 (ranks 2-3)", "found V100"),
        (gpus, _with(good, 1, gpu=None, gpu_error="no device"), "fail", "h0 (rank 1)", "no device"),
        (gpus, _on_node(good, 1, _gpu(num_gpus=8)), "warn", "h1", "6 GPUs of 8 without a rank"),
        (gpu_memory, _on_node(good, 3, _gpu(free_nbytes=40 * _GIB)), "warn", "h3 (rank 6)", "39.0 GiB"),
        (nccl_and_driver, _on_node(good, 1, _gpu(driver_cuda=11080)), "fail", "h1", "found one for 11.8"),
        (nccl_and_driver, _on_node(good, 1, _gpu(driver_cuda=12020)), "warn", "h1", "found one for 12.2"),
        (interfaces, _on_node(good, 1, _network(gloo=no_such)), "fail", "h1", "(lo, eth0, eth1), found no"),
        (
            interfaces,
            _on_node(good, 1, _network(nccl=InterfaceChoice(name="lo"))),
            "fail",
            "h1",
            "no other host",
        ),
        (
            interfaces,
            _on_node(good, 1, _network(nccl=InterfaceChoice(name="eth1"))),
            "warn",
            "h1",
            "eth0 has 100 Gbit",
        ),
        (
            interfaces,
            _on_node(good, 1, _network(gloo=InterfaceChoice(name="eth0", error="cannot bind"))),
            "fail",
            "h1",
            "cannot bind",
        ),
        (
            doors,
            replace(good, closed={("0", "2"): "timed out", ("1", "2"): "timed out"}),
            "fail",
            "h2 (ranks 4-5)",
            "to h0 and h1: timed out",
        ),
        (adapters, _on_node(with_efa, 1, _network(ofi_plugin=None)), "warn", "h1", "no aws-ofi-nccl"),
        (adapters, _on_node(with_efa, 1, _network(variables={"NCCL_NET": "Socket"})), "warn", "h1", "TCP"),
        (
            adapters,
            _on_node(with_efa, 1, _network(variables={"FI_PROVIDER": "tcp"})),
            "warn",
            "h1",
            "found tcp",
        ),
        (adapters, _on_node(with_efa, 1, _network(verbs_open=False)), "warn", "h1", "/dev/infiniband"),
        (adapters, _on_node(with_efa, 1, _network(adapters=[])), "fail", "h1", "expected EFA"),
        (
            adapters,
            replace(with_efa, networks={**good.networks, 2: NetworkResults(nccl_network="Socket")}),
            "warn",
            "h1",
            "TCP sockets",
        ),
        (compute_results, _computed(good, 6, nonfinite=3), "fail", "h3 (rank 6)", "3 values NaN"),
        (compute_results, _computed(good, 6, wrong_rows=1), "fail", "h3 (rank 6)", "1 wrong row"),
        (compute_results, _computed(good, 6, unstable=True), "fail", "h3 (rank 6)", "same bits"),
        (compute_results, _computed(good, 6, digest="e"), "fail", "h3 (rank 6)", "bits of the other devices"),
        (compute_speed, _computed(good, 6, rate=1.6e14), "warn", "h3 (rank 6)", "80.0% of the median"),
        (compute_speed, _computed(good, 6, rate=0.8e14), "fail", "h3 (rank 6)", "40.0% of the median"),
        (
            collectives,
            replace(good, networks={**good.networks, 4: NetworkResults(error="gloo: joining: timed out")}),
            "fail",
            "h2 (rank 4)",
            "timed out",
        ),
        (bandwidth, _scaled(good, lambda a, b: 0.8 if a == "h2" else 1), "warn", "h2", "sends at 800 MB/s"),
        (
            bandwidth,
            _scaled(good, lambda a, b: 0.1 if b == "h2" else 1),
            "fail",
            "h2",
            "receives at 100 MB/s",
        ),
        (pairs, _scaled(two, lambda a, b: 0.5 if a == "h0" else 1), "warn", "h0", "h0 to h1: 500 MB/s"),
        (
            pairs,
            _scaled(good, lambda a, b: 0.5 if (a, b) == ("h0", "h3") else 1),
            "warn",
            "h0 (ranks 0-1) and h3 (ranks 6-7)",
            "h0 to h3: 500 MB/s, the other way 1.00 GB/s",
        ),
        (folder, _folder(good, "2", error="PermissionError"), "fail", "h2", "cannot write to /fsx/run"),
        (folder, _folder(good, "2", sees_first=False), "fail", "h2", "not shared"),
        (folder_speed, _folder(good, "2", write_rate=1e8), "warn", "h2", "writes at 100 MB/s"),
        (folder_space, _folder(good, "2", free_nbytes=10**8), "fail", "", "3 checkpoints of 1.00 GB"),
        (answers, _missing(good, 5, 6, 7), "fail", "h2", "rank 5 did not come"),
        (answers, replace(good, stuck=(Stuck(rank=3, stage="compute"),)), "fail", "h1 (rank 3)", "product"),
    ]


def _without(survey: Survey, rank: int) -> Survey:
    """Nobody has measured anything with a rank that is not there."""
    ranks, computed = dict(survey.ranks), dict(survey.computed)
    ranks.pop(rank), computed.pop(rank)
    nodes = {facts.place.node for facts in ranks.values()}
    folders, clocks = (
        {n: facts for n, facts in every.items() if n in nodes} for every in (survey.folders, survey.clocks)
    )
    return replace(survey, ranks=ranks, computed=computed, networks={}, folders=folders, clocks=clocks)


def _computed(survey: Survey, rank: int, **changes: Any) -> Survey:
    return replace(survey, computed={**survey.computed, rank: replace(survey.computed[rank], **changes)})


def _folder(survey: Survey, node: str, **changes: Any) -> Survey:
    return replace(survey, folders={**survey.folders, node: replace(survey.folders[node], **changes)})


def _missing(survey: Survey, *ranks: int) -> Survey:
    for rank in ranks:
        survey = _without(survey, rank)
    hellos = {rank: place for rank, place in survey.hellos.items() if rank not in ranks}
    return replace(survey, hellos=hellos, stuck=tuple(Stuck(rank=rank, stage="hello") for rank in ranks))


@pytest.mark.parametrize(
    ("check", "survey", "level", "where", "text"),
    [pytest.param(*case, id=f"{case[0].__name__}-{case[4]}") for case in _cases()],
)
def test_a_fault_is_named(
    check: Callable[[Survey], list[Finding]], survey: Survey, level: str, where: str, text: str
) -> None:
    """With its host and the way out; the other checks do not turn it into a failure of theirs."""
    finding = check(survey)[0]
    assert (finding.level, finding.where[: len(where)]) == (level, where)
    assert text in finding.what
    assert finding.way_out
    others = [each for other in CHECKS if other is not check for each in other(survey)]
    caused = {"bandwidth", "pairs"} if check in (bandwidth, pairs) else {"settings"}
    assert [each for each in others if each.level == "fail" and each.check not in caused] == []


def test_a_node_that_did_not_come_is_told_by_its_number() -> None:
    """Of the missing ranks' hosts, one is known by its other rank, the other by nothing at all."""
    known, unknown = answers(_missing(_healthy(), 5, 6, 7))
    assert (known.where, unknown.where) == ("h2", "node 3 (no rank of it came)")
    assert "ranks 6-7 did not come" in unknown.what


def test_a_node_with_fewer_ranks_has_no_slow_link() -> None:
    """One connection carries less than two."""
    survey = _scaled(_healthy(), lambda a, b: 0.4 if "h3" in (a, b) else 1)
    sent = {
        rank: NetworkResults(sent=[each for each in found.sent if each.target != 7])
        for rank, found in survey.networks.items()
        if rank != 7
    }
    fewer = replace(_without(survey, 7), networks=sent)
    assert "found 1" in _only(ranks_per_node(fewer)).what
    assert [each.level for check in (bandwidth, pairs) for each in check(fewer)] == ["ok", "ok"]


def test_rank_zero_may_have_the_wrong_clock() -> None:
    """The median of all clocks counts, not rank 0's."""
    ahead = {str(node): ClockFacts(low=50.0, high=50.1) for node in range(1, 4)}
    finding = _only(clocks(replace(_healthy(), clocks={"0": ClockFacts(), **ahead})))
    assert finding.where == "h0 (ranks 0-1)"
    assert "50.0 s behind" in finding.what


def test_nodes_on_one_host_may_meet_on_its_loopback() -> None:
    """As those that `mics train` plays on one machine."""
    good = _healthy(2)
    ranks = {
        rank: replace(
            facts,
            place=replace(facts.place, host="h0", stack="h0"),
            network=replace(facts.network, gloo=InterfaceChoice(name="lo"), nccl=InterfaceChoice(name="lo")),
        )
        for rank, facts in good.ranks.items()
    }
    survey = replace(good, ranks=ranks)
    assert _only(interfaces(survey)).level == "ok"
    assert survey.hosts == ["h0 node 0", "h0 node 1"]


def test_many_hosts_are_one_line() -> None:
    """512 ranks with one fault: a line, not 64."""
    survey = _healthy(64, 8)
    survey = replace(survey, networks={})
    short = replace(
        survey,
        ranks={r: replace(f, machine=replace(f.machine, open_files=1024)) for r, f in survey.ranks.items()},
    )
    finding = _only(limits(short))
    assert finding.where.endswith("and 61 more hosts")
    assert len(finding.as_line()) < 250


def test_facts_travel_between_versions() -> None:
    """What a newer version adds is ignored, and what an older one lacks has its default."""
    facts = _rank(3, 2)
    text = encode(facts)
    assert decode(RankFacts, text.encode()) == facts
    newer = text.replace('{"place": {', '{"mood": 1, "place": {"colour": [2], ', 1)
    assert decode(RankFacts, newer.encode()) == facts
    assert decode(RankFacts, b'{"place": {"rank": 3}}').place == Place(rank=3)
