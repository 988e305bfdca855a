"""What ``watch`` does: the child process, the callbacks that it adds, the summary."""
