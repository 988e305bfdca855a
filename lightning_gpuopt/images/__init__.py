"""Image files to pixels: decoding, cropping, checks, normalisation."""
