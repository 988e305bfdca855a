"""The table of causes, and the rules that find them, one file for each part of a run."""
