"""The flight recorder: a ring for each rank and its workers, which outlives them; who fills it, and who reads it."""
