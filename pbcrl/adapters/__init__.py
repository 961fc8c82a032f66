"""The learned cost in other RL libraries, one file each; nothing else in `pbcrl` imports them.

`sb3` needs the extra `sb3`, `torchrl` the extra `torchrl`; `imitation` needs no other package.
`docs/adapters.md` shows each of them at work.
"""
