"""A point among hazards: the smallest task on which a cost limit and a reward pull apart."""

from pbcrl_envs.toy.point_hazards import PointHazardsEnv, PointHazardsVectorEnv

__all__ = ["PointHazardsEnv", "PointHazardsVectorEnv"]
