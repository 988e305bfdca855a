"""The doors to Lightning and torch: what is private of theirs is named and checked here."""
