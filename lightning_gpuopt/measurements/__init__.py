"""Plain measured data."""
