"""Finds how many workers a loader needs."""
