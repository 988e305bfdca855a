"""The public DataModules: thin wrappers around ``loading/``, ``storage/`` and ``dali/``."""
