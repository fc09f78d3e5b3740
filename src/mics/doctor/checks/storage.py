"""The folder of checkpoints, and the data to train on."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from typing import Final

from mics.checkpoint.remote import RemotePath
from mics.doctor.findings import Finding, fail, ok, warn
from mics.doctor.survey import Survey
from mics.utils.numbers import duration, volume

_SLOW_SHARE: Final = 0.5
_SAVE_SECONDS: Final = 600.0


def folder(survey: Survey) -> list[Finding]:
    """Every node can write there, and sees what rank 0 wrote."""
    path, found = survey.wishes.checkpoint_dir, []
    for node, facts in survey.folders.items():
        where = survey.on_nodes([node])
        if facts.error:
            way_out = (
                "check its endpoint, the credentials and the bucket's policy"
                if isinstance(path, RemotePath)
                else "give this user the right to write there, mount it read-write, or take another "
                "output_dir"
            )
            found.append(
                fail("checkpoints", f"cannot write to {path}: {facts.error}", where=where, way_out=way_out)
            )
        elif not facts.sees_first and not _first_failed(survey):
            way_out = "mount one file system (NFS, Lustre, FSx) there, or name such a one as output_dir"
            what = f"{path}: expected the file that rank 0 wrote, found none: the folder is not shared"
            found.append(fail("checkpoints", what, where=where, way_out=way_out))
    if found or not survey.folders:
        return found
    shared = ", and shared" if len(survey.folders) > 1 else ""
    return [ok("checkpoints", f"{path} can be written on each node{shared}")]


def _first_failed(survey: Survey) -> bool:
    """Nobody can see what rank 0 could not write."""
    first = survey.folders.get(next(iter(survey.nodes), ""))
    return first is None or bool(first.error)


def folder_speed(survey: Survey) -> list[Finding]:
    """How fast nodes write and read there, while all of them do."""
    writes = {node: facts.write_rate for node, facts in survey.folders.items() if facts.write_rate}
    reads = {node: facts.read_rate for node, facts in survey.folders.items() if facts.read_rate}
    if not writes:
        return []
    usual = statistics.median(writes.values())
    found = [
        warn(
            "checkpoint speed",
            f"writes at {volume(rate)}/s, the median is {volume(usual)}/s",
            where=survey.on_nodes([node]),
            way_out="check how that node mounts it (mount options, which network)",
        )
        for node, rate in writes.items()
        if len(writes) > 2 and rate < _SLOW_SHARE * usual
    ]
    nbytes = survey.wishes.checkpoint_nbytes
    took = nbytes / sum(writes.values()) if nbytes else 0.0
    if took > _SAVE_SECONDS:
        found.append(
            warn(
                "checkpoint speed",
                f"a checkpoint of {volume(nbytes or 0)} would take {duration(took)} to write",
                way_out="take a faster file system, or save less often",
            )
        )
    if found:
        return found
    read = f", reads {volume(min(reads.values()))}/s or more" if reads else ""
    saved = f"; a checkpoint of {volume(nbytes)} takes about {duration(took)}" if nbytes else ""
    return [ok("checkpoint speed", f"each node writes {volume(min(writes.values()))}/s or more{read}{saved}")]


def folder_space(survey: Survey) -> list[Finding]:
    """Room for the checkpoints that are kept and the one that is being written."""
    free = [facts.free_nbytes for facts in survey.folders.values() if not facts.error]
    nbytes = survey.wishes.checkpoint_nbytes
    if not free or nbytes is None or isinstance(survey.wishes.checkpoint_dir, RemotePath):
        return []
    wanted = (survey.wishes.kept + 1) * nbytes
    if min(free) >= wanted:
        return [ok("checkpoint space", f"{volume(min(free))} free, {volume(wanted)} needed")]
    return [
        fail(
            "checkpoint space",
            f"expected {volume(wanted)} for {survey.wishes.kept + 1} checkpoints of {volume(nbytes)}, found "
            f"{volume(min(free))} free",
            way_out="free space, take another output_dir, or lower checkpoint.keep",
        )
    ]


def data(survey: Survey) -> list[Finding]:
    """Every node can train on it: shards are there, of the right size and with the model's vocabulary."""
    missing = {node: facts.missing_shards for node, facts in survey.leaders.items() if facts.missing_shards}
    errors = {node: facts.data_error for node, facts in survey.leaders.items() if facts.data_error}
    found = _missing(survey, missing) if missing else []
    for error in dict.fromkeys(errors.values()):
        nodes = [node for node, each in errors.items() if each == error]
        what, _, way_out = error.partition("; ")
        found.append(fail("data", what, where=_some_nodes(survey, nodes), way_out=way_out))
    unseen = [node for node, facts in survey.leaders.items() if not facts.data_seen]
    if unseen:
        what = "data.shards: expected to find the sizes of all shards in a few seconds, found more to look at"
        way_out = "see whether the file system is slow there; training looks at all of them first"
        found.append(warn("data", what, where=_some_nodes(survey, unseen), way_out=way_out))
    if found or not survey.wishes.shards:
        return found
    folders = ", ".join(map(str, survey.wishes.shards))
    return [ok("data", f"{folders}: all shards are there and have their size")]


def _missing(survey: Survey, missing: Mapping[str, list[str]]) -> list[Finding]:
    folders = list(dict.fromkeys(each for found in missing.values() for each in found))
    what = (
        f"data.shards: expected folders that mics data prepare has made, found none at {', '.join(folders)}"
    )
    way_out = (
        "copy them there, or mount one file system on all hosts"
        if len(missing) < len(survey.nodes)
        else f"make them: mics data prepare FILES --tokenizer TOKENIZER --out {folders[0]}"
    )
    return [fail("data", what, where=_some_nodes(survey, missing), way_out=way_out)]


def _some_nodes(survey: Survey, nodes: Collection[str]) -> str:
    """Which ones; empty for all of them."""
    return "" if len(nodes) == len(survey.nodes) else survey.on_nodes(nodes)
