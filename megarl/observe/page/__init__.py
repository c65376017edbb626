"""The page of a run: live in `megarl view`, and as one file in report.html."""
