"""NVIDIA DALI as the decoder: order, sharding and resume stay with this package, DALI gets one batch after another."""
