"""Which of the processes that share the tests runs which."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

TOGETHER = frozenset(
    {
        "tests/callbacks/test_gpu_util_monitor_ddp.py",  # its ranks run once for all tests
        "tests/test_benchmarks.py",  # they measure: one after the other
        "tests/test_docs.py",  # the data of the pages is made once
        "tests/test_examples.py",  # each script runs once
    }
)
"""Files whose tests are run by one process, one after the other."""


class Files(LoadScopeScheduling):  # type: ignore[misc]
    """Gives out tests one by one, but the files of :data:`TOGETHER` as a whole.

    xdist marks its own groups by a suffix of the tests' node ids. With the newest pytest these cannot be changed, and
    ``--dist loadgroup`` has no effect.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if file in TOGETHER else nodeid
