"""Time in which something stopped the training thread, whatever it was doing: where a timeline keeps it."""

from __future__ import annotations

from typing import Final

from lightning_gpuopt.measurements.phases import GARBAGE_COLLECTION, RECOMPILATION

_LONG_NS: Final = 100_000  # pauses from this length on are kept for a GPU's clock


class PauseSlots:
    """The slots of a timeline that hold pauses, two for each slot that belongs to training steps.

    Python's collector calls :meth:`add` between any two instructions of the timeline. So all slots are made in advance,
    and nothing depends on what is half done: a pause is added to its slot, and subtracted from the open one, before the
    open slot gets its time. ``kinds`` and ``stopped`` have the slots of pauses by kind and by the slot of what was
    stopped; ``long`` those (begin, end, kind) that :meth:`split` has not seen, if ``keep_long``.
    """

    def __init__(self, ns: list[int], *, keep_long: bool) -> None:
        self.kinds: dict[int, str] = {}
        self.stopped: dict[int, int] = {}
        self._ns = ns
        self._keep_long = keep_long
        self._slots: dict[str, dict[int, int]] = {GARBAGE_COLLECTION: {}, RECOMPILATION: {}}
        self.long: list[tuple[int, int, str]] = []

    def watch(self, slot: int) -> None:
        """Keep the pauses of a slot of the training step from now on; those of other slots stay with them."""
        for kind, slots in self._slots.items():
            self._ns.append(0)
            made = len(self._ns) - 1
            self.kinds[made] = kind
            self.stopped[made] = slot
            slots[slot] = made

    def add(self, kind: str, current: int, begun_ns: int, ended_ns: int) -> bool:
        """Move a pause out of the open slot ``current``; False if that is no part of a step, and keeps the pause."""
        made = self._slots[kind].get(current)
        if made is None:
            return False
        ns, taken_ns = self._ns, ended_ns - begun_ns
        ns[made] += taken_ns
        ns[current] -= taken_ns
        if self._keep_long and taken_ns >= _LONG_NS:
            self.long.append((begun_ns, ended_ns, kind))
        return True

    def forget_long(self) -> None:
        self._keep_long = False
        self.long.clear()

    def split(self, work: list[int]) -> list[int]:
        """What the host has done (slot, end, ...), with long pauses in it; ``work`` goes on from what came last."""
        if not self.long:
            return work
        pauses, self.long = self.long, []
        parts: list[int] = []
        before_ns, taken = 0, 0
        for index in range(0, len(work), 2):
            slot, ended_ns = work[index], work[index + 1]
            while taken < len(pauses) and pauses[taken][0] < ended_ns:
                begun_ns, over_ns, kind = pauses[taken]
                over_ns = min(over_ns, ended_ns)
                if over_ns > before_ns:
                    parts += (slot, max(begun_ns, before_ns), self._slots[kind].get(slot, slot), over_ns)
                    before_ns = over_ns
                taken += 1
            parts += (slot, ended_ns)
            before_ns = ended_ns
        self.long = pauses[taken:] + self.long
        return parts

    def seconds_by_stopped(self, ns: list[int]) -> dict[str, dict[int, float]]:
        return {
            kind: {slot: ns[made] / 1e9 for slot, made in slots.items() if ns[made]}
            for kind, slots in self._slots.items()
        }
