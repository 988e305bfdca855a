"""Section ``prefetch`` of ``benchmarks/gpu.py``: what CudaPrefetcher hides, and what it costs the training thread."""

from __future__ import annotations

from typing import Any

from gpu_parts import Form, keep
from prefetch import a_workload, all_targets, claim, copies_section, host_sections, quiet


def prefetch(*, simulated: bool = False, form: Form = "full") -> dict[str, Any]:
    """The figures of ``benchmarks/prefetch.py``, in fewer rounds.

    Args:
        simulated: on the tests' simulated GPU: tries the benchmark out, and says nothing of a GPU.
        form: ``"quick"``: one cell of the grid, three sizes of batches; ``"trial"``: in one round.
    """
    quick, trial = form != "full", form == "trial"
    with quiet():
        with a_workload(simulated=simulated) as workload:
            copies = copies_section(workload, 1 if quick else 2, quick=quick, steps=8 if trial else None)
        keep({"copies": copies, "checks": {claim(each): each["passed"] for each in copies["targets"]}})
        rounds, steps = {"full": (9, 250), "quick": (3, 250), "trial": (1, 40)}[form]
        host = host_sections(rounds, simulated=simulated, quick=quick, steps=steps)
    result: dict[str, Any] = {"copies": copies, **host}
    result["checks"] = {claim(each): each["passed"] for each in all_targets(result)}
    return result
