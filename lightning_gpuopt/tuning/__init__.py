"""How many worker processes a loader needs: measured, predicted, and changed while training runs."""
