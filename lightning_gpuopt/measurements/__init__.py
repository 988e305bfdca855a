"""Plain measured data: what was read of phases, loaders, the host, ranks and the GPU. No torch, no clock, no I/O."""
