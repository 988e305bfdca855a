"""What ``patch`` does: where a setting is written, the edit, the diff, and the run that checks it."""
