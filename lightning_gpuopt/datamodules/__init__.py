"""The public DataModules: thin shells over ``loading/``, ``storage/`` and ``dali/``."""
