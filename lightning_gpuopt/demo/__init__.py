"""What the command ``demo`` does: the data set, the steps of the demonstration, and their table."""
