"""Output of `simulate`: tables in the console, and an HTML page."""
