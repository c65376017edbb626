"""`megarl doctor`: checks of a machine before a run. docs/doctor.md lists them."""
