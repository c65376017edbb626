"""Reading of a shell script up to its training command, as bash would evaluate it."""
