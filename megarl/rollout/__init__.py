"""Where samples come from: engines (admission by staleness, dynamic sampling) or a data set's own answers (SFT)."""
