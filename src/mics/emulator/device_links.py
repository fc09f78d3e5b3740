"""Links of a cluster on the GPU's own clock: the wait is a kernel, and the host runs ahead.

Each collective is two kernels of one thread on the stream it runs on. The first notes when the stream got
there, takes the next free moment of the links it uses and books them; the second spins until its end. What
the collective writes goes between the two, so that copying counts as part of the transfer. The bookings are
in device memory, one queue a link as in `HostLinks`, so collectives of different streams take turns in the
order in which the GPU reaches them. The clock is the GPU's global nanosecond timer: processor clocks change
with load.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Final

import torch

from mics.cost.collectives import Cost
from mics.emulator.log import Times

CAPACITY: Final = 1 << 16  # collectives whose times are kept

_SOURCE: Final = r"""
typedef long long i64;
typedef unsigned long long u64;

static __device__ i64 now() {
  u64 time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return (i64)time;
}

static __device__ i64 book(volatile i64* free_at, i64 arrival, i64 duration) {
  if (duration <= 0) return arrival;
  i64 start = *free_at > arrival ? *free_at : arrival;
  *free_at = start + duration;
  return start;
}

// state: lock, intra link free at, inter link free at.  row: arrival, start, end.
extern "C" __global__ void mics_link_reserve(volatile i64* state, i64* row, i64 intra, i64 inter) {
  while (atomicCAS((u64*)state, 0ull, 1ull) != 0ull) {}
  __threadfence();
  i64 arrival = now();
  i64 intra_start = book(&state[1], arrival, intra);
  i64 inter_start = book(&state[2], arrival, inter);
  i64 intra_end = intra_start + intra;
  i64 inter_end = inter_start + inter;
  row[0] = arrival;
  row[1] = inter > 0 ? inter_start : intra_start;
  row[2] = intra_end > inter_end ? intra_end : inter_end;
  __threadfence();
  atomicExch((u64*)state, 0ull);
}

extern "C" __global__ void mics_link_wait(const i64* row) {
  i64 end = row[2];
  for (i64 left = end - now(); left > 0; left = end - now()) {
    if (left > 4000) __nanosleep(1000);
  }
}
"""

RESERVE: Final = "mics_link_reserve"
WAIT: Final = "mics_link_wait"


class DeviceLinks:
    """Grants collectives their turns on one GPU's clock."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._reserve_kernel = _Kernel(RESERVE, num_args=4)
            self._wait_kernel = _Kernel(WAIT, num_args=1)
        self._state = torch.zeros(3, dtype=torch.int64, device=device)
        self._rows = torch.zeros(CAPACITY, 3, dtype=torch.int64, device=device)
        self._num_reserved = 0
        torch.cuda.synchronize(device)  # the zeros were written on one stream, kernels come on any
        # Nanoseconds since 1970 do not fit the digits of a float: count from now.
        self._reserve_kernel.launch(0, self._state.data_ptr(), self._row(0), 0, 0)
        torch.cuda.synchronize(device)
        self._origin = int(self._rows[0, 0])

    def reserve(self, cost: Cost, stream: int) -> int:
        """Book the links for a collective that starts when ``stream`` gets here; its number."""
        number = self._num_reserved
        self._num_reserved += 1
        self._reserve_kernel.launch(
            stream,
            self._state.data_ptr(),
            self._row(number),
            round(cost.intra_seconds * 1e9),
            round(cost.inter_seconds * 1e9),
        )
        return number

    def wait(self, number: int, stream: int) -> None:
        """Let ``stream`` go on when collective ``number`` has ended."""
        self._wait_kernel.launch(stream, self._row(number))

    def times(self, count: int) -> list[Times]:
        """Times of the last ``count`` collectives, at most CAPACITY. Waits for the device."""
        torch.cuda.synchronize(self._rows.device)
        rows = self._rows.tolist()
        found = (
            [(time - self._origin) * 1e-9 for time in rows[number % CAPACITY]]
            for number in range(self._num_reserved - count, self._num_reserved)
        )
        return [Times(arrival=arrival, start=start, end=end) for arrival, start, end in found]

    def _row(self, number: int) -> int:
        return self._rows.data_ptr() + number % CAPACITY * 24


class _Kernel:
    """A kernel of one thread whose arguments are 64-bit integers or addresses."""

    def __init__(self, name: str, *, num_args: int) -> None:
        compiled: Any = torch.cuda._compile_kernel(_SOURCE, name)
        self._compiled = compiled  # owns the loaded module
        self._function = compiled.func
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
        # The driver copies the arguments during the call, so one set of boxes serves every launch.
        self._boxes = [ctypes.c_longlong() for _ in range(num_args)]
        self._lock = threading.Lock()  # autograd's threads issue collectives too
        self._pointers = (ctypes.c_void_p * num_args)(*(ctypes.addressof(box) for box in self._boxes))

    def launch(self, stream: int, *args: int) -> None:
        with self._lock:
            for box, value in zip(self._boxes, args, strict=True):
                box.value = value
            status = self._launch(
                self._function, 1, 1, 1, 1, 1, 1, 0, ctypes.c_void_p(stream), self._pointers, None
            )
        if status != 0:
            raise RuntimeError(f"cuLaunchKernel failed with CUDA driver error {status}")
