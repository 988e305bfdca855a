"""Image files to pixels, and what is done with them: for any source."""
