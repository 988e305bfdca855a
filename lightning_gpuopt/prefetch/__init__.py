"""The next batch: fetched early, copied on a stream of its own."""
