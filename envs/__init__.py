"""Tasks with costs, registered with Gymnasium by `import pbcrl_envs`."""
