"""torch's distributed checkpoints: the public name of ``fullshard.state.saving.dcp``."""

from fullshard.state.saving.dcp import load_dcp as load_dcp, save_dcp as save_dcp
