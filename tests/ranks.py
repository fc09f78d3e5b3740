"""A pool of worker processes that play the ranks of a cluster on one machine.

Starting eight Python processes that import torch takes longer than most distributed tests, so the
workers are started once and reused. A worker waits for a task, takes on the rank the task names
(the variables `torchrun` would set, and the default process group), runs a function and answers
with its value or its exception.

    results = run_ranks(4, train, 0.1, ranks_per_node=2)      # [value of rank 0, ..., of rank 3]
    errors = run_expecting_error(4, shard_badly)              # [RankError of rank 0, ...]

- The default process group is kept while consecutive tasks use the same world size, and made
  again, on a fresh prefix of the parent's store, when the size changes or after a failure.
- All gloo groups of a worker share one thread that looks at their sockets. torch starts one for each, and
  each wakes up a hundred times a second: sharing saves 3 to 9% of CPU time.
- A rank that raises fails the test with its traceback. The others are then given a short grace;
  whoever is still inside a collective is asked for its stack, killed and started anew on next use.
- With `backend="nccl"` several ranks share one GPU: every rank claims a host of its own, because
  NCCL refuses two ranks of one host on one device.

Functions and arguments travel by pickle, so functions live at the top level of a module; tensors
travel by value.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import logging
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

MAX_WORLD_SIZE = 8
GROUP_TIMEOUT_S = 30.0
"""Timeout of every process group a task gets: a collective nobody joins fails after this long."""
TASK_TIMEOUT_S = 240.0
GRACE_S = 4.0
"""How long the other ranks may go on after one has raised."""

_LAUNCH_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


# ---------------------------------------------------------------------------------------------
# What travels
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a task runs: its rank, its node, and how much of a launcher it sees.

    `launch` is "group" (variables and a default process group), "variables" (as under torchrun
    before `init_process_group`) or "none" (a plain single process).
    """

    rank: int
    world_size: int
    ranks_per_node: int
    backend: str = "gloo"
    launch: str = "group"
    store_port: int = 0
    group_id: int = 0
    timeout_s: float = GROUP_TIMEOUT_S

    def variables(self) -> dict[str, str]:
        """The variables torchrun would set. The last node may be smaller than the others."""
        node = self.rank // self.ranks_per_node
        first = node * self.ranks_per_node
        local_world_size = min(self.ranks_per_node, self.world_size - first)
        num_nodes = -(-self.world_size // self.ranks_per_node)
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.rank - first),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(num_nodes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store_port),
        }


@dataclass(frozen=True)
class RankError:
    """The exception one rank raised, or how it ended if it raised none."""

    rank: int
    type_name: str
    message: str
    bases: tuple[str, ...] = ()
    trace: str = ""

    def is_a(self, name: str) -> bool:
        return name in self.bases


@dataclass(frozen=True)
class Answer:
    """What one rank answered: a value or an error, never both."""

    rank: int
    value: Any = None
    error: RankError | None = None


class RanksFailedError(AssertionError):
    """At least one rank raised, died or hung; the message holds every rank's traceback."""

    def __init__(self, errors: Sequence[RankError]) -> None:
        self.errors = list(errors)
        lines = [f"{len(self.errors)} rank(s) failed"]
        for error in self.errors:
            lines.append(f"--- rank {error.rank}: {error.type_name}: {error.message}")
            if error.trace:
                lines.append(error.trace.rstrip())
        super().__init__("\n".join(lines))


# ---------------------------------------------------------------------------------------------
# The worker's side
# ---------------------------------------------------------------------------------------------


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class _Seat:
    """A worker's current place in a process group."""

    def __init__(self) -> None:
        self._group: tuple[Any, ...] | None = None
        self._store: dist.Store | None = None  # one connection for life: now and then a new one takes 5 s
        self._num_modules = len(sys.modules)

    def take(self, place: Place) -> None:
        for name in _LAUNCH_VARIABLES:
            os.environ.pop(name, None)
        if place.launch != "none":
            os.environ.update(place.variables())
        torch.manual_seed(1000 + place.rank)
        if place.launch != "group":
            self.leave()
            return
        if place.backend == "nccl":
            torch.cuda.set_device(place.rank % torch.cuda.device_count())
        group = (place.group_id, place.world_size, place.rank, place.backend)
        if group == self._group and dist.is_initialized():
            return
        self.leave()
        timeout = timedelta(seconds=place.timeout_s)
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", place.store_port, is_master=False, timeout=timeout)
        dist.init_process_group(
            place.backend,
            store=dist.PrefixStore(f"group{place.group_id}", self._store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
        )
        self._group = group

    def leave(self) -> None:
        self._group = None
        _leave_group()

    def keep_imported(self) -> None:
        """What is imported stays, so that collecting after each task takes no time: transformers is 40 ms."""
        if len(sys.modules) > self._num_modules + 50:
            self._num_modules = len(sys.modules)
            gc.freeze()


def _describe(error: BaseException, rank: int) -> RankError:
    return RankError(
        rank,
        type(error).__name__,
        str(error),
        tuple(base.__name__ for base in type(error).__mro__),
        traceback.format_exc(),
    )


def _answer(seat: _Seat, place: Place | None, payload: bytes) -> Answer:
    rank = -1 if place is None else place.rank
    variables = dict(os.environ)
    try:
        if place is not None:
            seat.take(place)
        fn, args, kwargs = pickle.loads(payload)
        return Answer(rank, value=fn(*args, **kwargs))
    except Exception as error:
        return Answer(rank, error=_describe(error, rank))
    finally:
        os.environ.clear()  # what a task sets is gone with it
        os.environ.update(variables)
        logging.disable(logging.NOTSET)
        torch.set_num_threads(1)
        # torch turns it off for good at a bfloat16 product that this CPU has no instructions for.
        torch.backends.mkldnn.enabled = True
        gc.collect()  # a model holds its process groups through reference cycles of hooks
        seat.keep_imported()


def _to_cpu(value: Any) -> Any:
    """`value` with every tensor inside containers detached from the device it is on."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()  # a clone, or a view would carry its whole storage
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_to_cpu(item) for item in value)
    return value


def _share_gloo_device() -> None:
    """Give all gloo groups of this process one device, and so one thread."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    gloo = dist.ProcessGroupGloo
    device = gloo.create_device(interface=interface) if interface else gloo.create_default_device()
    make = gloo.__init__

    def init(self: Any, store: Any, rank: int, size: int, timeout: timedelta, **others: Any) -> None:
        assert not any(others.values()), others  # torch 2.15: enable_reconfigure, which nobody asks for
        options = gloo._Options()
        options._devices = [device]
        options._timeout = timeout
        make(self, store, rank, size, options)

    gloo.__init__ = init


def _worker(conn: Connection, index: int, stacks: str) -> None:
    """The life of a worker: answer tasks until the parent hangs up."""
    os.environ["NCCL_HOSTID"] = f"worker{index}"
    _share_gloo_device()
    torch.set_num_threads(1)
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; it closes the pipe
    with Path(stacks).open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
        seat = _Seat()
        while True:
            try:
                request = conn.recv_bytes()
            except (EOFError, OSError):
                break
            place, payload = pickle.loads(request)
            answer = _answer(seat, place, payload)
            try:
                reply = pickle.dumps(Answer(answer.rank, _to_cpu(answer.value), answer.error))
            except Exception as error:
                reply = pickle.dumps(Answer(answer.rank, error=_describe(error, answer.rank)))
            conn.send_bytes(reply)
        with contextlib.suppress(Exception):
            seat.leave()


# ---------------------------------------------------------------------------------------------
# The parent's side
# ---------------------------------------------------------------------------------------------

# Imported once by the server that workers are forked from. Optimizers import torch._dynamo on first use,
# which takes seconds; what is missing on a machine is passed over.
_PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "pytest", "hypothesis"]
_PRELOADED += ["mics", "mics.checkpoint", "mics.train.loop"]
# What takes two seconds in each worker, and few tests need: where the tests at hand have imported it.
_PRELOADED_WITH = {
    "transformers": "transformers.models.gpt2.modeling_gpt2",
    "transformers.trainer": "transformers.trainer",
    "tests.integrations.changed_imports": "tests.integrations.changed_imports",
    "lightning": "mics.integrations.lightning",
    "mics.fsdp": "mics.fsdp",
    "torchtitan.trainer": "tests.integrations.torchtitan_runs",
}

_WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
if sys.platform == "linux":
    _WORKER_ENVIRONMENT["GLOO_SOCKET_IFNAME"] = "lo"


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass
class _Worker:
    process: Any
    conn: Connection
    stacks: Path

    def stack(self) -> str:
        """Where the process is now, from its own fault handler."""
        before = self.stacks.stat().st_size if self.stacks.exists() else 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.05)
            if self.stacks.exists() and self.stacks.stat().st_size > before:
                time.sleep(0.05)
                return self.stacks.read_text()[before:]
        return ""

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.conn.close()


@dataclass
class RankPool:
    """Workers that play ranks; see the module's docstring.

    A pool of its own, closed by `with`, is for tests in which a rank dies.
    """

    size: int = MAX_WORLD_SIZE
    timeout_s: float = GROUP_TIMEOUT_S
    _workers: list[_Worker] = field(default_factory=list)
    _store: dist.TCPStore | None = None
    _group_id: int = 0
    _group: tuple[int, str] | None = None  # (world size, backend) of the living default group

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- running ------------------------------------------------------------------------------

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """The values `fn(*args)` had on ranks 0 to `world_size - 1`.

        Options: `ranks_per_node` (default: one node), `backend`, `launch`, `timeout_s` for the
        whole call, `kwargs` for `fn`.
        """
        answers = self.answers(world_size, fn, *args, **options)
        errors = [answer.error for answer in answers if answer.error is not None]
        if errors:
            raise RanksFailedError(errors)
        return [answer.value for answer in answers]

    def run_expecting_error(
        self, world_size: int, fn: Callable[..., Any], *args: Any, **options: Any
    ) -> list[RankError]:
        """The exception of every rank; a rank that returned or hung fails the test."""
        answers = self.answers(world_size, fn, *args, grace_s=GROUP_TIMEOUT_S + 10, **options)
        silent = [answer.rank for answer in answers if answer.error is None]
        hung = [a.error for a in answers if a.error is not None and a.error.type_name == "Hung"]
        if silent:
            raise AssertionError(f"ranks {silent} raised nothing: {answers}")
        if hung:
            raise RanksFailedError(hung)
        return [answer.error for answer in answers if answer.error is not None]

    def answers(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        ranks_per_node: int | None = None,
        backend: str = "gloo",
        launch: str = "group",
        timeout_s: float = TASK_TIMEOUT_S,
        grace_s: float = GRACE_S,
        kwargs: dict[str, Any] | None = None,
    ) -> list[Answer]:
        """Every rank's answer, errors included."""
        if not 1 <= world_size <= self.size:
            raise ValueError(f"expected 1 to {self.size} ranks, found {world_size}")
        self._start(world_size)
        if launch == "group":
            self._change_group(world_size, backend)
        payload = pickle.dumps((fn, args, kwargs or {}))
        assert self._store is not None
        for rank in range(world_size):
            place = Place(
                rank=rank,
                world_size=world_size,
                ranks_per_node=ranks_per_node or world_size,
                backend=backend,
                launch=launch,
                store_port=self._store.port,
                group_id=self._group_id,
                timeout_s=self.timeout_s,
            )
            self._workers[rank].conn.send_bytes(pickle.dumps((place, payload)))
        answers = self._collect(list(range(world_size)), timeout_s, grace_s)
        if any(answer.error is not None for answer in answers.values()) or launch != "group":
            self._dissolve_group()
        return [answers[rank] for rank in range(world_size)]

    def map(self, fn: Callable[..., Any], items: Iterable[tuple[Any, ...]]) -> list[Any]:
        """`[fn(*item) for item in items]`, on as many workers as there are cores; no ranks."""
        work = list(enumerate(items))
        num_workers = min(self.size, os.cpu_count() or 1, max(1, len(work)))
        self._start(num_workers)
        results: dict[int, Any] = {}
        busy: dict[int, int] = {}  # worker -> item
        work.reverse()
        while work or busy:
            for index in range(num_workers):
                if work and index not in busy:
                    item_index, item = work.pop()
                    payload = pickle.dumps((fn, item, {}))
                    self._workers[index].conn.send_bytes(pickle.dumps((None, payload)))
                    busy[index] = item_index
            wait([self._workers[index].conn for index in busy])
            for index in [i for i in busy if self._workers[i].conn.poll()]:
                answer = self._receive(index)
                if answer.error is not None:
                    for other in busy:
                        self._workers[other].kill()
                    self._forget_dead()
                    raise RanksFailedError([answer.error])
                results[busy.pop(index)] = answer.value
        return [results[index] for index in range(len(results))]

    def pids(self) -> list[int]:
        """Process ids of the workers alive now, in rank order."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Let every worker end; kill those that do not."""
        for worker in self._workers:
            worker.conn.close()
        for worker in self._workers:
            worker.process.join(timeout=3)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.stacks.unlink(missing_ok=True)
        self._workers.clear()
        self._store = None
        self._group = None

    # -- keeping the workers ------------------------------------------------------------------

    def _start(self, num_workers: int) -> None:
        if self._store is None:
            self._store = dist.TCPStore(
                "127.0.0.1",
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=self.timeout_s),
            )
        context = mp.get_context("forkserver")
        asked = [module for package, module in _PRELOADED_WITH.items() if package in sys.modules]
        context.set_forkserver_preload([*_PRELOADED, *asked])
        with _environment(_WORKER_ENVIRONMENT):
            while len(self._workers) < num_workers:
                parent_end, child_end = context.Pipe()
                handle, name = tempfile.mkstemp(prefix="rank-stack-")
                os.close(handle)
                process = context.Process(
                    target=_worker, args=(child_end, len(self._workers), name), daemon=True
                )
                process.start()
                child_end.close()
                self._workers.append(_Worker(process, parent_end, Path(name)))

    def _change_group(self, world_size: int, backend: str) -> None:
        """Make sure the next tasks meet in one group of this size."""
        if self._group == (world_size, backend):
            return
        self._dissolve_group()
        self._group_id += 1
        self._group = (world_size, backend)

    def _dissolve_group(self) -> None:
        """All workers leave the default group together, so that no one waits for another."""
        if self._group is None:
            return
        members = range(min(self._group[0], len(self._workers)))
        payload = pickle.dumps((_leave_group, (), {}))
        for index in members:
            self._workers[index].conn.send_bytes(pickle.dumps((None, payload)))
        self._collect(list(members), timeout_s=20, grace_s=20)
        self._group = None

    def _receive(self, index: int) -> Answer:
        worker = self._workers[index]
        try:
            return pickle.loads(worker.conn.recv_bytes())
        except (EOFError, OSError):
            worker.process.join(timeout=5)
            code = worker.process.exitcode
            return Answer(index, error=RankError(index, "Died", f"exit code {code}"))

    def _collect(self, indices: list[int], timeout_s: float, grace_s: float) -> dict[int, Answer]:
        deadline = time.monotonic() + timeout_s
        waiting = {self._workers[index].conn: index for index in indices}
        answers: dict[int, Answer] = {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for conn in ready:
                index = waiting.pop(conn)  # type: ignore[arg-type]
                answers[index] = self._receive(index)
                if answers[index].error is not None:
                    deadline = min(deadline, time.monotonic() + grace_s)
        for index in waiting.values():
            stack = self._workers[index].stack()
            message = "still running when the others had failed or the time was over"
            answers[index] = Answer(index, error=RankError(index, "Hung", message, (), stack))
        broken = [i for i, a in answers.items() if a.error and a.error.type_name in _BROKEN]
        if broken:
            for index in broken:
                self._workers[index].kill()
            self._forget_dead()
        return answers

    def _forget_dead(self) -> None:
        """After a kill start over with new workers: rank numbers are positions in the list."""
        for worker in self._workers:
            if worker.process.is_alive():
                worker.kill()
            worker.stacks.unlink(missing_ok=True)
        self._workers.clear()
        self._group = None


_BROKEN = ("Hung", "Died")

# ---------------------------------------------------------------------------------------------
# The session's pool
# ---------------------------------------------------------------------------------------------

POOL = RankPool()
atexit.register(POOL.close)


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """`RankPool.run` on the session's pool."""
    return POOL.run(world_size, fn, *args, **options)


def run_expecting_error(
    world_size: int, fn: Callable[..., Any], *args: Any, **options: Any
) -> list[RankError]:
    """`RankPool.run_expecting_error` on the session's pool."""
    return POOL.run_expecting_error(world_size, fn, *args, **options)
