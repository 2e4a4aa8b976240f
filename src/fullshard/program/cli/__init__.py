"""The command ``fullshard``: one file for each verb."""
