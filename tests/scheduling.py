"""Which of the processes that share the tests runs which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    import pytest
    from xdist.remote import Producer


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """Gives out tests one by one, but those of a group to a single process, which runs them one after the other.

    xdist marks its own groups by a suffix of the tests' node ids. With the newest pytest these cannot be changed, and
    ``--dist loadgroup`` has no effect.
    """

    def __init__(self, config: pytest.Config, log: Producer, groups: Mapping[str, tuple[str, ...]]) -> None:
        """Give out tests.

        Args:
            config: of pytest.
            log: of xdist.
            groups: by name, what the node ids of a group's tests begin with.
        """
        super().__init__(config, log)
        self._groups = groups

    def _split_scope(self, nodeid: str) -> str:
        return next((name for name, begins in self._groups.items() if nodeid.startswith(begins)), nodeid)
