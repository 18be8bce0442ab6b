"""`Recorder`: what each resource did when, and what of it lay under compute. It measures; it decides nothing.

[Note: steps and windows]
The window of step t goes from the end of `step()` t-1, or the first forward, to the end of `step()` t. What is not for
an update (fetches, compute, copies, stalls) counts to the window in which it ended. What is for an update counts to
the step whose update it is, whenever it runs: in `deferred` and `eager` mode the update of step t trails into the next
forward. So the summary of step t is final when its last block is published: the recorder hands it out at the first end
of a step at which none of it is due (that is one step later if anything trailed), or at `close`. Updates begun in
backward and dropped count to the step in which their last write ended.

*Hidden* is what of an update ran while a forward or a backward was under way, evaluation's too. That says nothing
about whether the forward had to wait for it: what it waited is its stall. Phases are those of the training thread; an
accelerator may lag behind it.

A stall whose wait ended at once (under 0.1 ms) is none. `parameters`: forward or backward waited for a fetch; `update`:
for the update of a block it needs; `gradient`: a gradient waited for its buffer; `activation`: a swapped activation
waited for space on its way out, or was waited for on its way back; `step`: step() waited for the norm, or for a serial
update.
"""
from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from lohan_ds.step_summary import RESOURCES, Moment, Phase, Span, StepAccount, StepSummary

TRACE_EVERY_STEPS = 100
_DIGEST_EVERY_SPANS = 64    # in whatever thread comes: step() would have to do all of it at once
_HIDING = ("forward", "backward")
_SHORTEST_STALL_S = 1e-4
_NO_STALL = contextlib.nullcontext()


class Recorder:
    """Any thread may call `span`, `stall` and `ssd_span`; the rest belongs to the training thread.

    Under `_lock`: all but `_fresh`, to which spans are only appended, and `_digest_at`. `report` gets the line of each
    final step, `trace_path` the trace, every 100 steps and at `close`; `on_final`, if set, its summary. Keeps the last
    `max_spans` spans and phases.
    """
    on_final: Callable[[StepSummary], None] | None = None

    def __init__(self, report: Callable[[str], None] | None = None, trace_path: str | None = None,
                 max_spans: int = 200_000):
        self._report, self._trace_path, self._max_spans = report, trace_path, max_spans
        self._lock = threading.RLock()
        self._fresh: deque[Span] = deque()                  # not accounted for yet
        self._digest_at = _DIGEST_EVERY_SPANS               # as many fresh ones
        self._kept: deque[Span] = deque(maxlen=max_spans)   # for the trace
        self._phases: list[Phase] = []                      # without gaps, the last one lasts
        self._accounts = {1: StepAccount(self._hidden_s)}   # of steps that are not final, by our own count
        self._latest: StepSummary | None = None             # of the last step that is final
        self._counters = (0, 0)                             # speculated, dropped: when the last step ended
        self._computing: tuple[str, Moment] | None = None
        self._cut_at: int | None = None                     # the first step whose update was not over at the end
        self._ending = False
        self.step = 1                                       # under way: our own count of calls of step()
        self.zero_s = time.perf_counter()

    # -- recording -----------------------------------------------------------------------------------------------

    def span(self, resource: str, name: str, start_s: Moment, end_s: Moment, nbytes: int = 0,
             for_step: int | None = None) -> None:
        """Something that has ended, or on a device will. `for_step`: the `step` whose update it is of."""
        self._fresh.append(Span(resource, name, start_s, end_s, nbytes, for_step, self.step))
        if len(self._fresh) >= self._digest_at:
            self._digest()

    def ssd_span(self, verb: str, path: str, start_s: float, end_s: float, nbytes: int, for_step: int | None) -> None:
        """`FileIo.on_span`."""
        self.span(f"ssd_{verb}", os.path.basename(path), start_s, end_s, nbytes, for_step)

    def copy_span(self, direction: str, start_s: Moment, end_s: Moment, nbytes: int) -> None:
        """`Streams.on_copy`."""
        self.span(direction, "copy", start_s, end_s, nbytes)

    def update_span(self, name: str, start_s: float, end_s: float, nbytes: int, for_step: int) -> None:
        """`Updater.on_span`."""
        self.span("cpu_update", name, start_s, end_s, nbytes, for_step)

    @contextlib.contextmanager
    def stall(self, cause: str) -> Iterator[None]:
        """Around a wait; `cause` is one of STALL_CAUSES."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            if end - start >= _SHORTEST_STALL_S:
                self.span("stall", cause, start, end)

    def compute(self, name: str | None, moment: Moment) -> None:
        """From `moment` on the device computes `name`; None: nothing that we know of."""
        if self._computing is not None:
            self.span("compute", *self._computing, moment)
        self._computing = None if name is None else (name, moment)

    def phase(self, name: str) -> None:
        """The training thread is in this phase from now on."""
        now = time.perf_counter()
        with self._lock:
            if self._phases:
                last = self._phases[-1]
                if last.name == name:
                    return
                self._phases[-1] = last._replace(end_s=now)
                self._accounts[self.step].phase_s[last.name] += now - last.start_s
            else:   # what was before training is of no step
                self._digest()
                self._accounts[self.step] = StepAccount(self._hidden_s)
            self._phases.append(Phase(name, now, math.inf))
            if len(self._phases) > 2 * self._max_spans:
                del self._phases[:self._max_spans]

    def end_step(self, label: int, num_speculated: int = 0, num_dropped: int = 0,
                 oldest_due: int | None = None) -> None:
        """step() is over; hands out the summaries that are final. `label`: what the user calls the step.

        The counters are of all steps; `oldest_due`: the first `step` of which blocks are not published yet.
        """
        with self._lock:
            self.phase("other")
            self._digest()
            account = self._accounts[self.step]
            account.label = label
            account.num_speculated = num_speculated - self._counters[0]
            account.num_dropped = num_dropped - self._counters[1]
            self._counters = num_speculated, num_dropped
            self.step += 1
            self._accounts[self.step] = StepAccount(self._hidden_s)
            summaries = self._finish_steps(self.step if oldest_due is None else oldest_due)
        self._hand_out(summaries)
        if self._trace_path is not None and (self.step - 1) % TRACE_EVERY_STEPS == 0:
            self.write_chrome_trace(self._trace_path)

    def end(self, oldest_due: int | None) -> None:
        """Ahead of `close`, before updates under way are cut; as `end_step`. Only the first call counts."""
        with self._lock:
            if not self._ending:
                self._ending, self._cut_at = True, oldest_due

    def close(self) -> None:
        """Hands out what is left and writes the trace; idempotent. No background work may be under way."""
        with self._lock:
            self._digest()
            summaries = self._finish_steps(self.step)
            trace_path, self._trace_path = self._trace_path, None
        self._hand_out(summaries)
        if trace_path is not None:
            self.write_chrome_trace(trace_path)

    # -- results -------------------------------------------------------------------------------------------------

    def step_summary(self, oldest_due: int | None = None) -> StepSummary | None:
        """Of the last step that ended, as far as is known now; None if there was none. `oldest_due` as in `end_step`:
        to have it final, drain the updates first."""
        with self._lock:
            self._digest()
            account = self._accounts.get(self.step - 1)
            if account is None:
                return self._latest
            return account.summary(account.label, is_final=oldest_due is None or oldest_due >= self.step)

    def intervals(self, resource: str) -> list[tuple[float, float]]:
        """Start and end of its last spans, as far as they have ended: in seconds of time.perf_counter."""
        with self._lock:
            self._digest()
            return [(span.start_s, span.end_s) for span in self._kept if span.resource == resource]

    def write_chrome_trace(self, path: str) -> None:
        """JSON trace events for chrome://tracing or Perfetto. Spans of a resource that overlap go to further rows."""
        with self._lock:
            self._digest()
            spans = sorted(self._kept, key=lambda span: span.start_s)
            phases = [phase for phase in self._phases[-self._max_spans:] if phase.name != "other"]
        now, events, rows = time.perf_counter(), [], {}
        for phase in phases:
            _add_event(events, rows, self.zero_s, "phase", phase.name, phase.start_s, min(phase.end_s, now), {})
        for span in spans:
            args = {"bytes": span.nbytes} if span.nbytes else {}
            args |= {"step": span.window} if span.for_step is None else {"update of step": span.for_step}
            _add_event(events, rows, self.zero_s, span.resource, span.name, span.start_s, span.end_s, args)
        temporary = f"{path}.{os.getpid()}.tmp"
        with open(temporary, "w") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
        os.replace(temporary, path)

    # -- accounts ------------------------------------------------------------------------------------------------

    def _hidden_s(self, start: float, end: float) -> float:
        """Seconds of [start, end) in forward or backward."""
        hidden = 0.0
        place = max(bisect.bisect_right(self._phases, start, key=lambda phase: phase.start_s) - 1, 0)
        for name, phase_start, phase_end in itertools.islice(self._phases, place, None):
            if phase_start >= end:
                break
            if name in _HIDING:
                hidden += max(0.0, min(end, phase_end) - max(start, phase_start))
        return hidden

    def _digest(self) -> None:
        """Accounts for what is fresh; what a device has not come to stays."""
        with self._lock:
            for _ in range(len(self._fresh)):
                span = self._fresh.popleft()
                start, end = (moment() if callable(moment) else moment for moment in (span.start_s, span.end_s))
                if start is None or end is None:
                    self._fresh.append(span)
                    continue
                span = span._replace(start_s=start, end_s=end)
                self._kept.append(span)
                account = self._accounts.get(span.window if span.for_step is None else span.for_step)
                if account is not None:
                    account.add(span)
            self._digest_at = len(self._fresh) + _DIGEST_EVERY_SPANS

    def _finish_steps(self, before: int) -> list[StepSummary]:
        """Ends the accounts of the steps before this one; their summaries, oldest first."""
        summaries = []
        for step in [step for step in sorted(self._accounts) if step < before]:
            account = self._accounts.pop(step)
            is_final = self._cut_at is None or step < self._cut_at
            self._latest = account.summary(account.label, is_final)
            summaries.append(self._latest)
        return summaries

    def _hand_out(self, summaries: list[StepSummary]) -> None:
        for summary in summaries:
            if self._report is not None:
                self._report(summary.line())
            if self.on_final is not None:
                self.on_final(summary)


def stalling(recorder: Recorder | None, cause: str) -> contextlib.AbstractContextManager:
    """Around a wait, whether it is recorded or not."""
    return _NO_STALL if recorder is None else recorder.stall(cause)


def _add_event(events: list[dict], rows: dict[str, list[list]], zero_s: float, resource: str, name: str, start: float,
               end: float, args: dict) -> None:
    """`rows`: of each resource [row's tid, when it is free], in the order of their first events; updated."""
    lanes = rows.setdefault(resource, [])
    lane = next((lane for lane in lanes if lane[1] <= start), None)
    if lane is None:
        lane = [100 * (("phase", *RESOURCES).index(resource) + 1) + len(lanes), 0.0]
        lanes.append(lane)
        row = {"ph": "M", "pid": 0, "tid": lane[0]}
        label = resource if len(lanes) == 1 else f"{resource} {len(lanes)}"
        events.append({**row, "name": "thread_name", "args": {"name": label}})
        events.append({**row, "name": "thread_sort_index", "args": {"sort_index": lane[0]}})
    lane[1] = end
    events.append({"ph": "X", "name": name, "cat": resource, "pid": 0, "tid": lane[0],
                   "ts": (start - zero_s) * 1e6, "dur": (end - start) * 1e6, "args": args})
