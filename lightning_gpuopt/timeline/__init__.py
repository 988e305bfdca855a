"""What the training loop does: exclusive time on the host and on the GPU, queues, workers, stacks."""
