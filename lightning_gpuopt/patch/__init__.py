"""What ``patch`` does: where files and cells of notebooks set something, the edit, the diff, the run that checks it."""
