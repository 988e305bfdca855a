"""What callbacks share: their base and its guard, argument checks, the channel between ranks, the progress bar."""
