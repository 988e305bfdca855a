"""Building a dataset: what is planned, who builds, and how it comes to be at its path."""
