"""Turns findings into changes, one at a time; each is kept or undone."""
