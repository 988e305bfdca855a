"""The actions of Lightning's profiler, and the phase of the training loop that each belongs to."""

from __future__ import annotations

from typing import Final

_STRATEGY_HOOKS: Final = {
    "batch_to_device": "transfer",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "validation_step": "validation",
    "on_train_batch_start": "other",
}

_MODULE_HOOKS: Final = {
    "on_before_batch_transfer": "transfer",
    "transfer_batch_to_device": "transfer",
    "on_after_batch_transfer": "transfer",
    "backward": "backward",
    "on_before_backward": "backward",
    "on_after_backward": "backward",
    "optimizer_step": "optimizer",
    "optimizer_zero_grad": "optimizer",
    "on_before_zero_grad": "optimizer",
    "on_before_optimizer_step": "optimizer",
    "configure_gradient_clipping": "optimizer",
    "lr_scheduler_step": "optimizer",
    "on_save_checkpoint": "checkpoint",
    "train_dataloader": "epoch_setup",
}

# a batch is brought on its way to the device before its turn, on a stream of its own
COPY_AHEAD: Final = "[CudaPrefetcher].copy_ahead"
# its turn has come: the stream of the computation waits for its copy
WAIT_FOR_COPY: Final = "[CudaPrefetcher].wait_for_copy"
_PLAIN_ACTIONS: Final = {
    COPY_AHEAD: "transfer",
    WAIT_FOR_COPY: "transfer",
    "run_training_epoch": "other",
    "run_training_batch": "other",
    "optimizer_step": "optimizer",
    "save_checkpoint": "checkpoint",
}


def phase_of(action: str) -> str | None:
    """The phase of an action of Lightning's profiler (2.5.0 to 2.6.6); None: its time stays with the action around."""
    if action in _PLAIN_ACTIONS:
        return _PLAIN_ACTIONS[action]
    owner, _, hook = action.rpartition(".")
    if hook == "train_dataloader_next":
        return "data_wait"
    if owner.startswith("[Callback]"):
        return "callbacks"
    if owner.startswith("[Strategy]"):
        return _STRATEGY_HOOKS.get(hook, "other")
    if owner.startswith(("[LightningModule]", "[LightningDataModule]")):
        if hook.startswith(("on_validation", "val_dataloader", "validation_step")):
            return "validation"
        # What the user writes into a module's other hooks is what others write into a callback's.
        return _MODULE_HOOKS.get(hook, "callbacks" if hook.startswith("on_") else "other")
    if hook in ("val_next", "validate_next"):
        return "validation"
    return None
