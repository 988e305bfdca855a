"""Batches that loader processes fill sample by sample, in memory that they share with the training process."""
