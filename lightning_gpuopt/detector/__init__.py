"""One ``fit`` under observation: instrumentation, sampling, accumulation, the report."""
