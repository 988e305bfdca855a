"""Which of the user's modules the host works for, by hooks that are there for a few steps only."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

log = logging.getLogger(__name__)

_SEEN: Final = "lightning_gpuopt"
"""Key in a node's metadata: its module is known."""


class ModuleCalls:
    """Notes the innermost module in forward, and in backward that whose gradient is computed.

    Forward hooks say where a module begins and ends. In backward a module begins when autograd reaches the node of its
    output, and lasts until the next one does: hooks on nodes leave the graph as it is, unlike those of
    ``register_full_backward_hook``.

    Args:
        module: the LightningModule; its own code outside of other modules is of no module.
        clock: seconds, the records' clock.
    """

    def __init__(self, module: nn.Module, clock: Callable[[], float]) -> None:
        self._module = module
        self._clock = clock
        self._handles: list[Any] = []
        self._open: list[str] = []
        self._moments: list[float] = []
        self._names: list[str] = []

    def begin(self) -> None:
        """Place the hooks. Where a module takes none, as a scripted one does, its work counts for what it is in."""
        for name, each in self._module.named_modules():
            if name:
                try:
                    self._handles += [
                        each.register_forward_pre_hook(self._entered(name)),
                        each.register_forward_hook(self._left(name), always_call=True),
                    ]
                except RuntimeError:
                    log.debug("no hooks on %s", name, exc_info=True)

    def end(self) -> None:
        """Take the hooks away; may be called more than once."""
        handles, self._handles = self._handles, []
        for each in handles:
            each.remove()

    def at(self, moment_s: float) -> str:
        """The module that the host worked for; empty where it was none."""
        index = bisect_right(self._moments, moment_s) - 1
        return self._names[index] if index >= 0 else ""

    def step_done(self) -> None:
        """A step has ended: what follows is of no module."""
        self._open.clear()
        self._note("")

    def _note(self, name: str) -> None:
        self._moments.append(self._clock())
        self._names.append(name)

    def _entered(self, name: str) -> Callable[..., None]:
        def entered(module: nn.Module, inputs: Any) -> None:
            self._open.append(name)
            self._note(name)

        return entered

    def _left(self, name: str) -> Callable[..., None]:
        def left(module: nn.Module, inputs: Any, output: Any) -> None:
            if name in self._open:
                del self._open[self._open.index(name) :]
            self._note(self._open[-1] if self._open else "")
            node = _node_of(output)
            if node is not None and self._handles and _SEEN not in node.metadata:
                node.metadata[_SEEN] = True
                node.register_prehook(lambda gradients: self._note(name))

        return left


def _node_of(output: Any) -> Any:
    """The node of the first tensor of an output that needs a gradient; None where there is none."""
    if isinstance(output, torch.Tensor):
        return output.grad_fn
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        return next((node for each in output if (node := _node_of(each)) is not None), None)
    return None
