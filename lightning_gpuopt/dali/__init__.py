"""NVIDIA DALI as the decoder."""
