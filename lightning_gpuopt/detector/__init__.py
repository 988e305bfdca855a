"""One ``fit`` under observation: what is instrumented, sampled and accumulated, and how its report is built."""
