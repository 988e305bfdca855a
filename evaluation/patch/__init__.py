"""Sixty ways to write a loader down: each gets the right patch or a refusal, and no wrong one."""
