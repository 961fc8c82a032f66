"""The learned cost in other RL libraries, one file each; nothing else in `pbcrl` imports them.

`sb3` needs the extra `sb3`, `torchrl` the extra `torchrl`. OmniSafe and imitation pin older
versions of Gymnasium: `omnisafe` needs an environment made for OmniSafe, and `imitation` imports
nothing of that library. `docs/adapters.md` shows each of them at work.
"""
