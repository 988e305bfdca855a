"""Attributes replaced for a while, and put back."""

from __future__ import annotations

import sys
from typing import Any

_ABSENT: Any = object()


class Patches:
    """What was replaced, in order."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``; it may be absent."""
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def set_all(self, owner: Any, **values: Any) -> None:
        """Replace several of ``owner``'s attributes."""
        for name, value in values.items():
            self.set(owner, name, value)

    def set_everywhere(self, packages: tuple[str, ...], name: str, make: Any) -> None:
        """Replace a function in each module of ``packages`` that imported it by name."""
        for module_name, module in list(sys.modules.items()):
            if module_name.partition(".")[0] in packages and callable(vars(module).get(name)):
                self.set(module, name, make(getattr(module, name)))

    def undo(self) -> None:
        """Put everything back."""
        while self._replaced:
            owner, name, value = self._replaced.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
