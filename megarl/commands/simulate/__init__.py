"""Command `simulate`: throughput and lag of asynchronous schedules, under a virtual clock."""
