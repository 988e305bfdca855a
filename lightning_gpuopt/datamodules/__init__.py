"""The public DataModules and ``SampleLoader``: thin wrappers around ``loading/``, ``storage/`` and ``dali/``."""
