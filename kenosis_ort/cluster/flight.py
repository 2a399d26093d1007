"""Running tasks on a cluster: submitted in their order, each once, even where workers die, restart or forget."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

from kenosis_ort.cluster.client import Cluster
from kenosis_ort.errors import ClusterError

_log = logging.getLogger(__name__)

T = TypeVar("T")

FORGOTTEN: Final = ("cancelled", "lost")
"""What Dask calls a task that the scheduler knows no more."""
_AHEAD: Final = 4
"""Tasks under way for each slot; what is done early waits on the workers, which may spill it to disk."""
_NO_WORKER_S: Final = 120.0
_POLL_S: Final = 5.0
_RESTARTS: Final = 8


class Flight(Generic[T]):
    """Keeps some tasks under way, from the moment it is made.

    Args:
        cluster: The cluster.
        tasks: What is to be done; taken as there is room.
        send: Sends a task under a key that ends with the given text, and returns Dask's future. Where the last argument
            is true, all that the task needs is sent anew too, since workers died that had it.
        name: Returns what messages call a task.
    """

    def __init__(
        self,
        cluster: Cluster,
        tasks: Iterator[T],
        send: Callable[[T, str, bool], Any],
        name: Callable[[T], str],
    ) -> None:
        self._cluster, self._client = cluster, cluster.client
        self._tasks, self._send, self._name = tasks, send, name
        self._running: dict[int, tuple[T, Any]] = {}
        self._begun = self._forgotten = 0
        self._window = _AHEAD * cluster.slots
        self._fill()

    def outcomes(self) -> Iterator[tuple[T, Any]]:
        """Yields each task with what it returned; None where every worker died that was given it, also when alone.

        Raises:
            ClusterError: The scheduler is gone, no worker was there for long, or they fail for reasons of their own.
        """
        for number in itertools.count():
            self._fill()
            if number not in self._running:
                return
            task, future = self._running[number]
            outcome = self._outcome(task, future) or self._alone(number, task)
            del self._running[number]
            yield task, outcome

    def end(self) -> None:
        """Cancels the tasks that still run."""
        self._running.clear()

    def _fill(self) -> None:
        for task in itertools.islice(self._tasks, max(0, self._window - len(self._running))):
            self._running[self._begun] = task, self._send(task, f"{self._begun}-{self._forgotten}", False)
            self._begun += 1

    def _again(self, task: T) -> Any:
        """Sends a task once more that the scheduler has forgotten.

        Raises:
            ClusterError: That happens again and again.
        """
        self._forgotten += 1
        if self._forgotten > _RESTARTS * (len(self._running) + 1):
            raise ClusterError(
                f"The Dask scheduler has forgotten what it was given, {self._forgotten} times.",
                where=self._name(task),
                fix="See who restarts the cluster or cancels its tasks, and repeat the call; nothing was written.",
            )
        _log.info("the scheduler has forgotten %s: it is sent once more", self._name(task))
        return self._send(task, f"again-{self._forgotten}", False)

    def _alone(self, number: int, task: T) -> Any:
        """Runs a task again when no other is under way, whose workers died; these may have died of another one."""
        _log.info("the workers of %s died: it runs again, alone", self._name(task))
        for other, (known, future) in self._running.items():
            if other != number:
                self._outcome(known, future)
        return self._outcome(task, self._send(task, f"{number}-alone", True))

    def _outcome(self, task: T, future: Any) -> Any:
        """Waits for a task; None where its workers died, more often than Dask tries.

        Raises:
            ClusterError: The scheduler is gone, or no worker was there for long, or they fail for reasons of their own.
        """
        from distributed import TimeoutError as NotYet
        from distributed.scheduler import KilledWorker

        seen = time.monotonic()
        while True:
            try:
                return future.result(timeout=_POLL_S)
            except NotYet:
                pass
            except KilledWorker:
                return None
            except Exception as error:
                if self._client.status == "running":
                    if future.status not in FORGOTTEN:
                        raise ClusterError(
                            f"A worker failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
                            where=self._name(task),
                            fix="See the worker's log; the data may be right.",
                        ) from error
                    future = self._again(task)
                    continue
            if self._client.status != "running":
                raise ClusterError(f"The Dask client is {self._client.status}.", fix="Repeat the call with a new one.")
            if any(worker.get("status", "running") == "running" for worker in self._cluster.workers().values()):
                seen = time.monotonic()
            elif time.monotonic() - seen > _NO_WORKER_S:
                deaths = self._deaths(task, future)
                of_what = ", ".join(f"{name} ({count} times)" for name, count in deaths)
                raise ClusterError(
                    f"No worker is left that runs, for {_NO_WORKER_S:.0f} seconds: they died, or are paused since they "
                    f"have no memory left.{' Workers died while they had ' + of_what + '.' if deaths else ''}",
                    where=", ".join(name for name, count in deaths if count == deaths[0][1]) or "executor",
                    fix="Start workers again, with more memory, and repeat the call; nothing was written.",
                )

    def _deaths(self, task: T, future: Any) -> list[tuple[str, int]]:
        """Names of tasks under way with how many workers died of each, as the scheduler counts; the likeliest first.

        What waits on a worker counts with what it was at, and so does what it has just done.
        """

        def counted(dask_scheduler: Any) -> dict[str, int]:  # travels by value: a scheduler may be without this package
            return {str(key): known.suspicious for key, known in dask_scheduler.tasks.items()}

        counts = self._client.run_on_scheduler(counted)
        deaths: dict[str, int] = {}
        for known, sent in (*self._running.values(), (task, future)):
            name = self._name(known)
            deaths[name] = max(deaths.get(name, 0), counts.get(str(sent.key), 0))
        return sorted(((name, count) for name, count in deaths.items() if count), key=lambda entry: -entry[1])
