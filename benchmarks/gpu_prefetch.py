"""Section ``prefetch`` of ``benchmarks/gpu.py``: what CudaPrefetcher hides, and what it costs the training thread."""

from __future__ import annotations

from typing import Any

from prefetch import a_place, all_targets, claim, copies_section, host_sections, quiet


def prefetch(*, simulated: bool = False, quick: bool = False) -> dict[str, Any]:
    """The figures of ``benchmarks/prefetch.py``, in fewer rounds.

    Args:
        simulated: on the tests' simulated GPU: tries the benchmark out, and says nothing of a GPU.
        quick: one cell of the grid, three sizes of batches.
    """
    with quiet():
        with a_place(simulated=simulated) as place:
            copies = copies_section(place, 1 if quick else 2, quick=quick)
        host = host_sections(3 if quick else 9, simulated=simulated, quick=quick)
    result: dict[str, Any] = {"copies": copies, **host}
    result["checks"] = {claim(each): each["passed"] for each in all_targets(result)}
    return result
