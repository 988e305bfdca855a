"""What the training loop does: exclusive time per phase, on the host and on the GPU."""
