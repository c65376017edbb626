"""`megarl plan`: memory and time of a recipe, counted before anything is allocated; see docs/planner.md."""
