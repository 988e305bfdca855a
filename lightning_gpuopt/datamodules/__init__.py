"""LightningDataModules: thin shells over the rooms below."""
