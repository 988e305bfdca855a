"""Order, sampler, loader and resume for any map-style dataset."""
