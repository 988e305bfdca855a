"""The causes: their table, and the rules that find them, one module for each part of a run."""
