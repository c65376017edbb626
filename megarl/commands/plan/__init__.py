"""What each rank of a recipe holds and needs, counted before anything is allocated; see docs/planner.md."""
