"""The report, drawn: as text, as a page, in charts."""
