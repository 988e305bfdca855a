"""Which of the processes that share the tests runs which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    import pytest
    from xdist.remote import Producer


class OneGroup(LoadScopeScheduling):  # type: ignore[misc]
    """Gives out tests one by one, but one group of them together: a single process works through it, first of all.

    The groups of xdist itself are told by the ends of the tests' names, which the newest pytest does not let it change:
    it takes no notice of them then.
    """

    def __init__(self, config: pytest.Config, log: Producer, group: tuple[str, ...]) -> None:
        """Give out tests.

        Args:
            config: of pytest.
            log: of xdist.
            group: what the names of its tests begin with.
        """
        super().__init__(config, log)
        self._group = group

    def _split_scope(self, nodeid: str) -> str:
        return "group" if nodeid.startswith(self._group) else nodeid
