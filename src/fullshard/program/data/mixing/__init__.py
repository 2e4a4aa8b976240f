"""Mixtures of several data sets: the share of each in an epoch, and their concatenated rows."""
