"""The loaders of a Trainer: what each is, whatever its kind, and the one registry in which they are seen."""
