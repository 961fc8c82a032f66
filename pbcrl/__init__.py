"""pbcrl."""
