"""What the hardware does: NVML, the host, processes."""
