"""What ``demo`` does: the photographs, the training, its steps, the table."""
