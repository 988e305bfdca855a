"""One run's GPU monitoring: this rank's sampler, the other ranks' windows, and the figures they make together."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict

from lightning_gpuopt.telemetry.cuda import chooser
from lightning_gpuopt.telemetry.keys import Metric, readings_of
from lightning_gpuopt.telemetry.nvml import Notice
from lightning_gpuopt.telemetry.sampler import GpuSampler
from lightning_gpuopt.telemetry.visible import DeviceNotFoundError
from lightning_gpuopt.telemetry.window import Fleet, RankWindow
from lightning_gpuopt.utils.rank_channel import Gathered, RankGather


class GpuMonitor:
    """Monitor GPUs from here to :meth:`close`; all methods are for one thread, and none of them makes an NVML call.

    ``current`` is the CUDA ordinal that ``"auto"`` means. Readings are ``interval_s`` apart in the mean, more where
    they are dear if ``bounded``. The ranks' figures come together on rank 0.
    """

    def __init__(
        self,
        metrics: Sequence[Metric],
        devices: str | Sequence[int | str],
        *,
        interval_s: float,
        bounded: bool = True,
        current: int = 0,
        rank: int = 0,
        world_size: int = 1,
        node: int = 0,
        num_nodes: int = 1,
    ) -> None:
        self._node = node
        self._own_notices: deque[Notice] = deque()
        self._problem_reported = False
        self._fleet = Fleet(metrics, multi_node=num_nodes > 1)
        self._arrived: deque[Gathered] = deque()
        self._gather = RankGather("gpu-monitor", rank, world_size, self._arrived.append)
        choose = chooser(devices, current, self._own_notices)
        self._sampler = GpuSampler(readings_of(metrics), choose, interval_s=interval_s, bounded=bounded)
        self._sampler.start()

    def wait_until_open(self, timeout_s: float) -> DeviceNotFoundError | None:
        """Wait until the devices are known, ``timeout_s`` seconds at most; gives the error if one is not there."""
        self._sampler.wait_until_open(timeout_s)
        failure = self._sampler.failure
        return failure if isinstance(failure, DeviceNotFoundError) else None

    def restart(self) -> None:
        self._sampler.cut()

    def cut(self, step: int) -> None:
        """End this rank's window at that logging step, and send it on its way."""
        window = RankWindow(self._node, self._sampler.cut())
        if not self._gather.collects:
            self._fleet.add([window])
        self._gather.post(step, asdict(window))

    def ready(self) -> list[tuple[int, dict[str, float]]]:
        """Steps and figures of the windows that have become complete, oldest first; on rank 0 only."""
        return [
            (gathered.step, self._fleet.add([RankWindow.from_json(window) for window in gathered.by_rank.values()]))
            for gathered in [self._arrived.popleft() for _ in range(len(self._arrived))]
        ]

    def notices(self) -> list[Notice]:
        """What the user should know, and was not reported yet."""
        if self._has_problem:
            self._problem_reported = True
            text = f"each rank reports only its own GPU figures: {self._gather.problem}."
            self._own_notices.append(Notice("warning", "gather", text))
        pending: list[Notice] = []
        for queue in (self._own_notices, self._sampler.notices):
            while queue:
                pending.append(queue.popleft())
        return pending

    @property
    def _has_problem(self) -> bool:
        return self._gather.problem is not None and not self._problem_reported

    @property
    def has_pending(self) -> bool:
        """Whether :meth:`ready` or :meth:`notices` would return something. Cheap enough for every step."""
        return bool(self._own_notices or self._sampler.notices or self._arrived) or self._has_problem

    def summary(self) -> dict[str, float]:
        """The figures of the run so far: on rank 0 of all ranks, elsewhere of this rank's devices."""
        return self._fleet.summary(RankWindow(self._node, self._sampler.peek()))

    def close(self, step: int, timeout_s: float, gather_timeout_s: float) -> None:
        """End the last window, at this logging step, and the threads.

        Of what came in time: :meth:`ready` and :meth:`notices`. It waits ``timeout_s`` for an NVML call that hangs,
        rank 0 ``gather_timeout_s`` for the others' last windows.
        """
        if not self._sampler.stop(timeout_s):
            text = "NVML does not respond: its thread keeps running, and will shut NVML down when the call returns."
            self._own_notices.append(Notice("warning", "nvml-hangs", text))
        self.cut(step)
        self._gather.close(gather_timeout_s)
