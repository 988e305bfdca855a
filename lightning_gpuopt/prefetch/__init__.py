"""The next batch on its way to the device, while the current one is trained on."""
