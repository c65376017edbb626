"""`megarl view`: a page about runs that reads their files while they are written."""
