"""Interfaces, adapters, collectives and bandwidth."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from itertools import permutations

from mics.doctor.checks.devices import SLOW, VERY_SLOW
from mics.doctor.facts import Interface, InterfaceChoice, RankFacts
from mics.doctor.findings import Finding, fail, ok, warn
from mics.doctor.interfaces import VIRTUAL
from mics.doctor.survey import Survey
from mics.utils.numbers import listed, percent, plural, volume

_ONE_WAY = 0.7
"""A direction below this share of what both ends can do elsewhere is named."""


def interfaces(survey: Survey) -> list[Finding]:
    """The interface that gloo and NCCL take is there, leads outside, and is not the slow one."""
    several = len({facts.place.stack for facts in survey.ranks.values()}) > 1
    found, taken = [], []
    for node, facts in survey.leaders.items():
        where = survey.on_nodes([node])
        for library, choice in (("gloo", facts.network.gloo), ("NCCL", facts.network.nccl)):
            if choice is not None:
                found += _judge_choice(library, choice, facts.network.interfaces, where, several=several)
                taken.append(f"{library} takes {choice.name}")
    if found or not taken:
        return found
    return [ok("interface", listed(list(dict.fromkeys(taken))))]


def _judge_choice(
    library: str, choice: InterfaceChoice, there: list[Interface], where: str, *, several: bool
) -> list[Finding]:
    variable = f"{library.upper()}_SOCKET_IFNAME"
    best = _best(there)
    better = f"set {variable}={best.name} there" if best else f"set {variable} there to the one between hosts"
    names = ", ".join(each.name for each in there)
    chosen = next((each for each in there if each.name == choice.name), None)
    if chosen is None:
        what = f"{choice.because}: expected one of this host's interfaces ({names}), found no such one"
        return [fail("interface", what, where=where, way_out=better)]
    if choice.error:
        what = f"{library} cannot use {chosen.name} ({choice.because}): {choice.error}"
        return [fail("interface", what, where=where, way_out=better)]
    if not several:
        return []
    if chosen.loopback:
        what = f"{library} takes {chosen.name} ({choice.because}), which reaches no other host"
        return [fail("interface", what, where=where, way_out=better)]
    if not chosen.up:
        what = f"{library} takes {chosen.name} ({choice.because}), which is down"
        return [fail("interface", what, where=where, way_out=f"bring it up, or {better}")]
    if chosen.name.startswith(VIRTUAL):
        what = f"{library} takes {chosen.name} ({choice.because}), which joins containers of one host"
        return [warn("interface", what, where=where, way_out=better)]
    if best and chosen.speed_mbit and best.speed_mbit and best.speed_mbit > chosen.speed_mbit:
        what = f"{library} takes {chosen.name} with {_speed(chosen)}, though {best.name} has {_speed(best)}"
        return [warn("interface", what, where=where, way_out=better)]
    return []


def _best(there: Iterable[Interface]) -> Interface | None:
    """The fastest that is up and leads outside."""
    usable = [each for each in there if each.up and each.addresses and not each.loopback]
    usable = [each for each in usable if not each.name.startswith(VIRTUAL)]
    return max(usable, key=lambda each: (each.speed_mbit or 0, each.physical), default=None)


def _speed(interface: Interface) -> str:
    mbit = interface.speed_mbit or 0
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit} Mbit/s"


def adapters(survey: Survey) -> list[Finding]:
    """EFA and InfiniBand: there, and in use."""
    found: list[Finding] = []
    kinds: dict[str, list[str]] = defaultdict(list)
    for node, facts in survey.leaders.items():
        for kind in dict.fromkeys(adapter.kind for adapter in facts.network.adapters):
            kinds[kind].append(node)
        if facts.network.adapters:
            where = survey.on_nodes([node])
            found += [warn("adapters", what, where=where, way_out=way) for what, way in _unused(facts)]
            found += _by_nccl(survey, node, where)
    for name, nodes in kinds.items():
        without = [node for node in survey.nodes if node not in nodes]
        if without:
            way_out = "start all nodes with the same network options, in one placement group"
            what = f"expected {_name(name)} as on the other nodes, found none"
            found.append(fail("adapters", what, where=survey.on_nodes(without), way_out=way_out))
    if found or not kinds:
        return found
    return [ok("adapters", f"{listed([_name(kind) for kind in kinds])} on each node")]


def _name(kind: str) -> str:
    return {"efa": "EFA", "infiniband": "InfiniBand", "roce": "RoCE"}[kind]


def _unused(facts: RankFacts) -> Iterable[tuple[str, str]]:
    """Why an adapter that is there would not be used, each with the way out."""
    network = facts.network
    kinds = {adapter.kind for adapter in network.adapters}
    names = listed([_name(kind) for kind in sorted(kinds)])
    variables = network.variables
    if not network.verbs_open:
        yield (
            f"{names} is there, but this process cannot open /dev/infiniband/uverbs*",
            "give the container the devices (docker run --device=/dev/infiniband, or the EFA device plugin)",
        )
    down = [adapter.name for adapter in network.adapters if not adapter.active]
    if down:
        yield f"{listed(down)}: no active port", "check the cable and the switch (ibstat)"
    if facts.gpu is None or facts.gpu.ranks_per_gpu > 1:
        return
    if variables.get("NCCL_NET") == "Socket":
        yield f"{names} is there, but NCCL_NET=Socket makes NCCL use TCP", "unset NCCL_NET"
    if "efa" in kinds:
        provider = variables.get("FI_PROVIDER", "efa")
        if provider != "efa":
            yield f"FI_PROVIDER: expected efa, found {provider}", "unset FI_PROVIDER, or set it to efa"
        if network.ofi_plugin is None:
            yield (
                "EFA is there, but NCCL finds no aws-ofi-nccl library to use it",
                "install the EFA installer's aws-ofi-nccl, and add its lib folder to LD_LIBRARY_PATH",
            )
    elif variables.get("NCCL_IB_DISABLE", "0") == "1":
        yield f"{names} is there, but NCCL_IB_DISABLE=1 makes NCCL use TCP", "unset NCCL_IB_DISABLE"


def _by_nccl(survey: Survey, node: str, where: str) -> list[Finding]:
    """What NCCL itself said."""
    facts = survey.leaders[node]
    said = {survey.networks[r].nccl_network for r in survey.nodes[node] if r in survey.networks}
    if facts.gpu is None or facts.gpu.ranks_per_gpu > 1 or "Socket" not in said:
        return []
    way_out = "run with NCCL_DEBUG=INFO, and see why it passes the adapter over"
    return [
        warn(
            "adapters",
            "NCCL sends through TCP sockets, not through the adapter",
            where=where,
            way_out=way_out,
        )
    ]


def doors(survey: Survey) -> list[Finding]:
    """Hosts reach each other on the interface that gloo takes, at any port."""
    found = []
    by_target: dict[str, dict[str, str]] = defaultdict(dict)
    for (source, target), reason in survey.closed.items():
        by_target[target][source] = reason
    for target, reasons in by_target.items():
        door = survey.leaders[target].network.door
        found.append(
            fail(
                "ports",
                f"does not answer at {door} to {_some([survey.host_of(node) for node in reasons])}: "
                f"{listed(sorted(set(reasons.values())))}",
                where=survey.on_nodes([target]),
                way_out="open all TCP ports between the hosts (firewall, security group), and check that the "
                "address is one that the others have a route to",
            )
        )
    if found or len(survey.nodes) < 2:
        return found
    return [ok("ports", "nodes reach each other on the interface of gloo")]


def _some(names: list[str]) -> str:
    return listed(names) if len(names) < 4 else f"{listed(names[:3])} and {len(names) - 3} more"


def collectives(survey: Survey) -> list[Finding]:
    """Ranks could make a process group, and a sum came out right."""
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, result in survey.networks.items():
        if result.error:
            alike[re.sub(r"[0-9]+", "#", result.error)].append(rank)
    way_out = "open all ports between the hosts, and see the lines about interfaces"
    found = [
        fail("collectives", survey.networks[ranks[0]].error, where=survey.where(ranks), way_out=way_out)
        for ranks in alike.values()
    ]
    if found or not survey.networks:
        return found
    backend = "gloo and NCCL" if survey.on_gpu else "gloo"
    who = plural(len(survey.networks), "rank")
    if len(survey.networks) < survey.num_ranks:
        who = f"{who} of {survey.num_ranks}"
    return [ok("collectives", f"an all-reduce of {who} over {backend} is right")]


def node_rates(survey: Survey) -> dict[tuple[str, str], float]:
    """Bytes per second from one node to another, all its ranks together; and inside one, of its slowest.

    Not between nodes with different numbers of ranks, which have their own line: a link is not to blame.
    """
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in survey.transfers:
        ends = survey.ranks[each.source].place.node, survey.ranks[each.target].place.node
        if len(survey.nodes[ends[0]]) == len(survey.nodes[ends[1]]):
            found[ends].append(each.nbytes / each.seconds)
    return {
        ends: min(rates) if ends[0] == ends[1] else len(rates) * min(rates) for ends, rates in found.items()
    }


def bandwidth(survey: Survey) -> list[Finding]:
    """Nodes that send, receive or exchange inside more slowly than the median."""
    rates = node_rates(survey)
    between = {ends: rate for ends, rate in rates.items() if ends[0] != ends[1]}
    sends, receives = _best_of(between, 0), _best_of(between, 1)
    inside = {ends[0]: rate for ends, rate in rates.items() if ends[0] == ends[1]}
    found: list[Finding] = []
    for verb, each in (("sends", sends), ("receives", receives), ("exchanges inside", inside)):
        found += _slow_nodes(survey, verb, each)
    if found or not between:
        return found
    usual = statistics.median(between.values())
    return [
        ok(
            "bandwidth",
            f"{volume(usual)}/s between two nodes (median), {volume(min(between.values()))}/s at least",
        )
    ]


def _best_of(rates: dict[tuple[str, str], float], end: int) -> dict[str, float]:
    """The best of a node's pairs: a bad partner is not its fault."""
    found: dict[str, float] = {}
    for ends, rate in rates.items():
        found[ends[end]] = max(rate, found.get(ends[end], 0.0))
    return found


def _slow_nodes(survey: Survey, verb: str, rates: dict[str, float]) -> list[Finding]:
    if len(rates) < 3:  # of two, nobody knows which one is slow: see the check of pairs
        return []
    usual = statistics.median(rates.values())
    return [
        (fail if rate < VERY_SLOW * usual else warn)(
            "bandwidth",
            f"{verb} at {volume(rate)}/s, {percent(rate / usual)} of the median {volume(usual)}/s",
            where=survey.on_nodes([node]),
            way_out="check its cable, switch port and interface (ethtool); leave the node out meanwhile",
        )
        for node, rate in rates.items()
        if rate < SLOW * usual
    ]


def pairs(survey: Survey) -> list[Finding]:
    """Single connections that are slower than both their ends: a bad path, or one way only."""
    rates = {ends: rate for ends, rate in node_rates(survey).items() if ends[0] != ends[1]}
    sends, receives = _best_of(rates, 0), _best_of(rates, 1)
    found = []
    for source, target in permutations(survey.nodes, 2):
        rate, back = rates.get((source, target)), rates.get((target, source))
        if rate is None or back is None:
            continue
        possible = min(sends[source], receives[target]) if len(sends) > 2 else back
        if rate < _ONE_WAY * possible:
            ends = f"{survey.host_of(source)} to {survey.host_of(target)}"
            elsewhere = f", both elsewhere {volume(possible)}/s or more" if len(sends) > 2 else ""
            found.append(
                warn(
                    "pairs",
                    f"{ends}: {volume(rate)}/s, the other way {volume(back)}/s{elsewhere}",
                    where=survey.on_nodes([source, target]),
                    way_out="check duplex, routes and firewall between these two (ethtool, ip route, iperf3)",
                )
            )
    if found or len(rates) < 2:
        return found
    tried = f"{len(rates) // 2} of {_num_pairs(len(survey.nodes))} pairs of nodes tried"
    return [ok("pairs", f"{tried}, none slower than its two ends")]


def _num_pairs(num_nodes: int) -> int:
    return num_nodes * (num_nodes - 1) // 2
