"""How many workers a loader needs."""
