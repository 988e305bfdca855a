"""Observes one ``fit``: instruments the Trainer, samples, accumulates figures, and builds the report."""
