"""What can be known of a machine before a run: ``python -m megarl doctor``. docs/doctor.md lists what is looked at."""
