"""Applies what findings advise while training runs, one change at a time, and keeps what proves a gain."""
