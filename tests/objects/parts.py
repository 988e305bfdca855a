"""Objects whose classes are made up."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset


class Held:
    """Has the attributes that it is given."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


def made(bases: tuple[type, ...] = (Dataset,), **of_class: Any) -> Any:
    """An object of a user's class with these methods and attributes."""
    return type("Made", bases, of_class | {"__module__": __name__})()
