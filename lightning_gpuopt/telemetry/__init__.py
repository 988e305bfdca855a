"""What the hardware does: NVML readings, taken on a background thread."""
