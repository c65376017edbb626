"""Plans on the console and as an HTML page."""
