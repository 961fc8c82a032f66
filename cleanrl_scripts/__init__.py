"""Scripts to run, not to import: `pbcrl train ppo_lag_pbcrl`, or `python ppo_lag_pbcrl.py`.

The wheel installs this folder as `pbcrl_scripts`, so that the command `pbcrl` finds them.
"""

import sys

if sys.argv[:1] == ["-m"] and not getattr(sys.flags, "safe_path", False):
    # `python -m` looks for every module in the working directory first, which may be the folder of
    # a run, and this from somebody else.
    del sys.path[0]
