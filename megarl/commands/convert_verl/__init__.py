"""From a verl script or command line to a recipe."""
