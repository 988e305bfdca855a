"""A report as text, as a page, as a flame graph."""
