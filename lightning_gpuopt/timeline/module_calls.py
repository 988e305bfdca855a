"""Which of the user's modules the host works for, by hooks that are there for a few steps only."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules import module as of_all_modules

log = logging.getLogger(__name__)

_SEEN: Final = "lightning_gpuopt"  # key in a node's metadata: its module is known
_DEPTH: Final = 4


class ModuleCalls:
    """Notes the innermost module in forward, and in backward that whose gradient is computed.

    Forward hooks say where a module begins and ends. They are those of all modules: nothing is kept on a module, which
    may be pickled, copied or scripted meanwhile. In backward a module begins when autograd reaches the node of its
    output, and lasts until the next one does: hooks on nodes leave the graph as it is, unlike those of
    ``register_full_backward_hook``. The LightningModule's own code outside of other modules is of no module.
    """

    def __init__(self, module: nn.Module, clock: Callable[[], float]) -> None:
        self._names = {id(each): name for name, each in module.named_modules() if name}
        self._clock = clock
        self._handles: list[Any] = []
        self._open: list[tuple[int, str]] = []
        self._now = ""
        self._notes: list[tuple[float, str]] = []

    def begin(self) -> None:
        self._handles.append(of_all_modules.register_module_forward_pre_hook(self._entered))
        self._handles.append(of_all_modules.register_module_forward_hook(self._left, always_call=True))

    def end(self) -> None:
        """Take the hooks away; may be called more than once."""
        handles, self._handles = self._handles, []
        for each in handles:
            each.remove()

    def at(self, moment_s: float) -> str:
        index = bisect_right(self._notes, moment_s, key=lambda note: note[0]) - 1
        return self._notes[index][1] if index >= 0 else ""

    def step_done(self) -> None:
        """A step has ended: what follows is of no module."""
        self._open.clear()
        self._note("")

    def _note(self, name: str) -> None:
        self._now = name
        self._notes.append((self._clock(), name))

    def _entered(self, module: nn.Module, inputs: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            self._open.append((id(module), self._now))
            self._note(name)

    def _left(self, module: nn.Module, inputs: Any, output: Any) -> None:
        name, opened = self._names.get(id(module)), [number for number, _ in self._open]
        if name is None or id(module) not in opened:
            return
        index = len(opened) - 1 - opened[::-1].index(id(module))
        before = self._open[index][1]
        del self._open[index:]
        self._note(before)
        try:
            node = _node_of(output)
            if node is not None and _SEEN not in node.metadata:
                node.metadata[_SEEN] = True
                node.register_prehook(lambda gradients: self._note(name) if self._handles else None)
        except RuntimeError:  # a view whose base was changed in place has no node that may be asked for
            log.debug("no node of the output of %s", name, exc_info=True)


def _node_of(output: Any, depth: int = _DEPTH) -> Any:
    """The node of the first tensor of an output that needs a gradient; None if there is none."""
    if isinstance(output, torch.Tensor):
        return output.grad_fn
    if isinstance(output, dict):
        output = list(output.values())
    if depth and isinstance(output, (list, tuple)):
        return next((node for each in output if (node := _node_of(each, depth - 1)) is not None), None)
    return None
