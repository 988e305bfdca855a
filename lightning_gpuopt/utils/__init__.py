"""What callbacks share: argument checks, the channel between ranks, guards, and the progress bar."""
