"""A bundle: one file with everything that repeats a step of a run on another machine (`megarl replay --bundle`)."""
