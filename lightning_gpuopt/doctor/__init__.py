"""Checks of an environment: pure checks, and what gathers their numbers."""
