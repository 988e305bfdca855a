"""Applies the advice of findings while training runs, one change at a time, and keeps the changes that prove a gain."""
