"""Trajectories and labels on disk: our datasets, Minari's and DSRL's, and the log of labels."""
