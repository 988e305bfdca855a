"""What users see while ``fit`` runs: an item in the Trainer's progress bar, and text printed beside it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from lightning_gpuopt.compat.lightning import Trainer, shadow
from lightning_gpuopt.utils.replaced_method import Replacement

log = logging.getLogger(__name__)


class BarItem:
    """One item among the metrics of whatever progress bar the Trainer has: ``data=42 %``.

    It is added to what the bar's ``get_metrics`` returns, that of a user's own subclass included, and so is in no
    logger and no ``callback_metrics``. It is plain text: showing it asks nothing of the GPU.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._text: str | None = None

    def set_percent(self, value: float) -> None:
        """Show this, 0-100 %, from the bar's next refresh on."""
        self._text = f"{value:.0f} %"

    def show_in(self, trainer: Trainer) -> Callable[[], None]:
        """Add it to the Trainer's progress bar, if there is one; the undo may be called more than once."""
        bar = trainer.progress_bar_callback
        if bar is None or not callable(getattr(bar, "get_metrics", None)):
            return lambda: None
        get_metrics = bar.get_metrics
        with_item = Replacement(get_metrics, lambda *args, **kwargs: self.added_to(get_metrics(*args, **kwargs)))
        return shadow(bar, "get_metrics", with_item)

    def added_to(self, metrics: Any) -> Any:
        if self._text is None or self._label in metrics:
            return metrics
        return {**metrics, self._label: self._text}


def print_once_fit_has_ended(trainer: Trainer, text: str, *, interrupted: bool = False) -> None:
    """Print on rank 0's stdout, where ``interrupted`` above a bar; what the terminal cannot show is replaced."""
    if not trainer.is_global_zero:
        return
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = text.encode(encoding, "replace").decode(encoding)
    bar = trainer.progress_bar_callback
    try:
        if interrupted and bar is not None and getattr(bar, "is_enabled", False):
            bar.print(text)
        else:
            print(text, flush=True)  # noqa: T201 - what the user asked to see, as the model summary is
    except (OSError, ValueError):  # whoever read our output has gone, or stdout is closed
        log.debug("the report could not be printed", exc_info=True)
