"""Findings become changes, one at a time; each is kept or taken back."""
