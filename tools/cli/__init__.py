"""Commands, one file per family."""
