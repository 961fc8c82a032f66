"""What the scripts share and no algorithm cares about: run folders, checkpoints, films."""
