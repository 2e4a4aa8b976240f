"""Mixtures: several data sets, the share of each in an epoch, and their rows one after another."""
