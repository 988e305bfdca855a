"""Thin Lightning shells over the rooms below."""
