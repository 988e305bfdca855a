"""Who is called at the events of a training step."""

from __future__ import annotations


class StepObserver:
    """What happens in a training step, event by event; by default nothing. Called on the training thread."""

    def epoch_begins(self) -> None:
        """An epoch is about to ask for its iterators, or has just got them, and then for its first batch."""

    def fetch_begins(self) -> None:
        """The loop asks for a batch; not for the first of an epoch."""

    def fetch_ends(self, wait_s: float) -> None:
        """The batch is there, after so many seconds."""

    def batch_arrives(self) -> None:
        """The batch is about to be copied to the device."""

    def batch_copied(self) -> None:
        """The copy has been issued."""

    def batch_ready(self) -> None:
        """The strategy has the batch on the device; called where more than the copy lay in that."""

    def compute_begins(self) -> None:
        """The step's own work is about to be issued."""

    def compute_ends(self) -> None:
        """All of the step's own work has been issued."""

    def forward_begins(self) -> None:
        """The work of ``training_step`` is about to be issued."""

    def forward_ends(self) -> None:
        """All work of ``training_step`` has been issued."""

    def broadcast_begins(self) -> None:
        """Lightning is about to ask all ranks whether a signal told it to stop."""

    def broadcast_ends(self) -> None:
        """The ranks have answered."""

    def validation_begins(self) -> None:
        """A validation is about to begin."""

    def validation_ends(self) -> None:
        """The validation is over."""

    def host_work_begins(self) -> None:
        """A hook, a logger call, a checkpoint or a fetch begins, which may be long."""

    def host_work_ends(self) -> None:
        """The hook, logger call, checkpoint or fetch has ended."""
