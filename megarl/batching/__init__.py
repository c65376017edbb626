"""From a batch of groups to each rank's micro batches: pure functions."""
