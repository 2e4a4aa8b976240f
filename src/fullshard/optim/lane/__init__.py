"""Elementwise optimizers that step neighboring shards as one flat tensor."""

from fullshard.optim.lane.lane_optimizer import LaneOptimizer as LaneOptimizer
