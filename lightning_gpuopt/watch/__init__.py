"""What the command ``watch`` does: a child process, the mailbox between both, the callbacks it adds, the summary."""
