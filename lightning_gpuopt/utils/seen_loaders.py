"""Where the loaders that a Trainer has made pass by, before they are iterated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from lightning_gpuopt.utils.replacement import Replacement


class LoaderListener(Replacement):
    """In front of ``strategy.process_dataloader``: passes each loader on as the strategy has made it.

    Args:
        process: the strategy's method.
        see: called with each loader.
    """

    def __init__(self, process: Callable[[object], object], see: Callable[[Any], None]) -> None:
        super().__init__(process)
        self._see = see

    @override
    def __call__(self, dataloader: object) -> object:
        processed: object = self._original(dataloader)
        self._see(processed)
        return processed
