"""report.html: the page of a run."""
