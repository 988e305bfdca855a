"""Plain measured data, and what a loader with other workers would give."""
