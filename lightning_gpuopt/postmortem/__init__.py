"""Why a run died or hangs: flight records in, a post-mortem out. No torch, no clock; I/O only if one is saved."""
