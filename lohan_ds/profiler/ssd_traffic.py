"""`Traffic`: a steady stream of chunks to and from a few open files, and what it says about their drives."""
from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from lohan_ds.profiler.rates import MIN_SAMPLES, Rate
from lohan_ds.store.file_io import FileIo, SsdFile
from lohan_ds.work import Work

_SAMPLE_S = 0.2
_SLOWED_TO = 0.75           # of the first rate: the drive's fast cache is full


class Traffic:
    """Goes through the files over and over, chunk by chunk, with every buffer in flight. One thread."""

    def __init__(self, io: FileIo, files: Sequence[SsdFile], used_bytes: Sequence[int],
                 buffers: Sequence[Sequence[Tensor]]):
        """`used_bytes`: of each file, from its start, whole chunks. `buffers`: as many for each file, of one chunk."""
        self._io, self._files, self._buffers = io, files, buffers
        self._chunk_bytes = buffers[0][0].numel()
        self._places = [itertools.cycle(range(0, used, self._chunk_bytes)) for used in used_bytes]

    def run(self, kind: str, seconds: float, max_bytes: float) -> list[float]:
        """Bytes per second in a few samples; "read", "write" or "mixed". Ends after `seconds` or `max_bytes`, but never
        before every buffer was used three times, and when the drives have it all: syncing counts in the last sample.
        """
        if kind == "read":
            self._drop_page_cache()
        num_buffers = len(self._files) * len(self._buffers[0])
        start_s, marks = time.perf_counter(), [(time.perf_counter(), 0)]   # time, bytes so far
        flights: deque[Work] = deque()
        for count in itertools.count():
            if len(flights) == num_buffers:
                self._land(flights, marks)
            over = time.perf_counter() - start_s >= seconds or count * self._chunk_bytes >= max_bytes
            if over and count >= MIN_SAMPLES * num_buffers:
                break
            flights.append(self._submit(kind, count))
        while flights:
            self._land(flights, marks)
        if kind != "read":
            self._io.sync(self._files).wait()
            marks[-1] = (time.perf_counter(), marks[-1][1])
        return _rates(marks)

    def _land(self, flights: deque[Work], marks: list[tuple[float, int]]) -> None:
        flights.popleft().wait()
        marks.append((time.perf_counter(), marks[-1][1] + self._chunk_bytes))

    def _submit(self, kind: str, count: int) -> Work:
        turn, index = divmod(count, len(self._files))
        buffers = self._buffers[index]
        file, buffer, offset = self._files[index], buffers[turn % len(buffers)], next(self._places[index])
        if kind == "read" or (kind == "mixed" and turn % 2):
            return self._io.read(file, offset, buffer)
        return self._io.write(file, offset, buffer)

    def _drop_page_cache(self) -> None:
        for file in self._files:
            if not file.direct:
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _rates(marks: list[tuple[float, int]]) -> list[float]:
    """Bytes per second between marks that are a sample apart, 0.2 s or a third of the whole. What is left at the end,
    with the sync in it, goes to the last one."""
    step_s = min(_SAMPLE_S, (marks[-1][0] - marks[0][0]) / MIN_SAMPLES)
    cuts = [marks[0]]
    for mark in marks[1:]:
        if mark[0] - cuts[-1][0] >= step_s:
            cuts.append(mark)
    if len(cuts) > 1:
        cuts[-1] = marks[-1]
    else:
        cuts.append(marks[-1])
    return [(end[1] - begin[1]) / (end[0] - begin[0]) for begin, end in zip(cuts, cuts[1:])]


def sustained(samples: Sequence[float]) -> tuple[Rate, float | None]:
    """Of the samples of one long write: the rate of its second half; and the rate of its end, if the drive has slowed
    down on the way, so that this is what it can keep up."""
    half, quarter = len(samples) // 2, max(1, len(samples) // 4)
    end = statistics.median(samples[-quarter:])
    slowed = end < _SLOWED_TO * statistics.median(samples[:quarter])
    return Rate.of(samples[half:]), end if slowed else None
