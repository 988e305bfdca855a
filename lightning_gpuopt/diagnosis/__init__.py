"""Why the GPU waits: measurements in, findings and reports out."""
