"""Scripts to run, not to import: `pbcrl train ppo_lag_pbcrl`, or `python ppo_lag_pbcrl.py`.

The wheel installs this folder as `pbcrl_scripts`, so that the command `pbcrl` finds them.
"""
